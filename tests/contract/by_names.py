"""`python -m tests.contract.by_names`: the room `names`, of checkpoints in which other things stand under some names.

A small model of layers, an embedding and a head is saved twice: the second time names are exchanged, renumbered, lost,
doubled, tied or given a prefix, tensors are joined, cut, seen in another shape, empty or not finite. And tensors of
many shapes, those with a dim of one, of none and of many rows among them, each changed in the ways in which values go
wrong. Each pair is compared in both directions.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.contract import store
from tests.contract.by_axes import cast, file
from tests.contract.judge import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Model = dict[str, Array]
    Kinds = dict[str, tuple[str, Array]]

ROOM = "names"
LAYERS = 4
LOST = 2
SHAPES = ((48,), (1, 8), (6, 1), (2, 3, 8), (4, 1, 6), (), (0, 4), (1, 1), (200, 3), (16, 16))


def model(seed: int = 0) -> Model:
    """Return the tensors of a model: an embedding, layers with a weight and a bias, a norm and a head."""
    random = np.random.default_rng(seed)
    made: Model = {"embed.weight": random.standard_normal((10, 6))}
    for layer in range(LAYERS):
        made[f"layers.{layer}.up.weight"] = random.standard_normal((8, 6))
        made[f"layers.{layer}.up.bias"] = random.standard_normal(8)
    return made | {"norm.weight": 1 + random.standard_normal(6) / 8, "head.weight": random.standard_normal((10, 6))}


def renamed(made: Model, names: Mapping[str, str]) -> Model:
    """Return a model with some tensors under other names."""
    return {names.get(name, name): one for name, one in made.items()}


def numbered(made: Model, numbers: Mapping[int, int]) -> Model:
    """Return a model with its layers renumbered; a layer without a number is lost."""
    found = {name: one for name, one in made.items() if not name.startswith("layers.")}
    for name, one in made.items():
        if name.startswith("layers.") and (number := int(name.split(".")[1])) in numbers:
            found[f"layers.{numbers[number]}.{name.split('.', 2)[2]}"] = one
    return found


def without(made: Model, *words: str) -> Model:
    """Return a model without the tensors that have one of some words in their names."""
    return {name: one for name, one in made.items() if not any(word in name for word in words)}


def of_names(made: Model) -> Iterator[tuple[str, Model]]:
    """Yield what may have become of the names of a model."""
    up, bias = "layers.{}.up.weight", "layers.{}.up.bias"
    yield "the same", made
    yield "two exchanged", renamed(made, {up.format(1): up.format(2), up.format(2): up.format(1)})
    yield "three in a ring", renamed(made, {up.format(one): up.format((one + 1) % 3) for one in range(3)})
    yield "embedding and head exchanged", renamed(made, {"embed.weight": "head.weight", "head.weight": "embed.weight"})
    yield "layers counted from 1", numbered(made, {one: one + 1 for one in range(LAYERS)})
    yield "layers reversed", numbered(made, {one: LAYERS - 1 - one for one in range(LAYERS)})
    yield "halves of layers exchanged", numbered(made, {0: 2, 1: 3, 2: 0, 3: 1})
    yield "every rank from 0", numbered(made, {2: 0, 3: 1})
    yield "last layer lost", numbered(made, {0: 0, 1: 1, 2: 2})
    yield "first layer lost", numbered(made, {1: 1, 2: 2, 3: 3})
    yield "a layer twice", {**made, **{name.replace(".1.", ".2."): made[name] for name in made if ".1." in name}}
    yield "one layer everywhere", {name: made.get(f"layers.0.{name[9:]}", one) for name, one in made.items()}
    for prefix in ("model.", "module.", "_orig_mod."):
        yield f"with {prefix}", {f"{prefix}{name}": one for name, one in made.items()}
    yield "half with model.", {f"model.{name}" if "layers" in name else name: one for name, one in made.items()}
    yield "biases called b", renamed(made, {bias.format(one): f"layers.{one}.up.b" for one in range(LAYERS)})
    yield "tied", {**made, "head.weight": made["embed.weight"]}
    yield "head lost", without(made, "head")
    yield "embedding lost", without(made, "embed")
    yield "tied and one lost", {**without(made, "embed"), "head.weight": made["embed.weight"]}
    yield "norm lost", without(made, "norm")
    yield "biases lost", without(made, "bias")
    yield "all lost but one", {"norm.weight": made["norm.weight"]}
    yield "one more", {**made, "rotary": np.arange(4.0)}
    yield "one more, a copy", {**made, "head.bias": made[up.format(0)][:, 0]}
    yield "moved and lost", {**without(made, "layers.3.up.weight"), up.format(2): made[up.format(3)]}
    yield "a copy under a new name", {**made, "other.weight": made[up.format(0)]}
    yield "zeros", {**made, up.format(1): made[up.format(1)] * 0}
    yield "biases of zeros", {name: one * 0 if "bias" in name else one for name, one in made.items()}
    yield "ones for the norm", {**made, "norm.weight": np.ones(6)}
    yield "not finite", {**made, up.format(1): np.full((8, 6), np.nan)}
    yield "another model", model(7)
    yield "one layer of another model", {**made, **{name: one for name, one in model(7).items() if ".1." in name}}
    yield "halfway to another model", {name: (one + other) / 2 for (name, one), other in _beside(made, model(7))}
    yield "turned", {**made, up.format(1): made[up.format(1)].T}
    yield "all turned", {name: one.T for name, one in made.items()}
    yield "flattened", {**made, up.format(1): made[up.format(1)].ravel()}
    yield "with a dim of one", {name: one[None] for name, one in made.items()}
    yield "rows cut", {**made, "embed.weight": made["embed.weight"][:8]}
    yield "rows padded", {**made, "embed.weight": np.pad(made["embed.weight"], ((0, 6), (0, 0)))}
    yield (
        "rows padded with ones",
        {**made, "head.weight": np.pad(made["head.weight"], ((0, 2), (0, 0)), constant_values=1)},
    )
    yield (
        "joined",
        {**without(made, ".up.weight"), "layers.up.weight": np.stack([made[up.format(one)] for one in range(LAYERS)])},
    )
    yield (
        "joined along rows",
        {**without(made, ".up.weight"), "up.weight": np.concatenate([made[up.format(one)] for one in range(LAYERS)])},
    )
    yield (
        "cut in two",
        {**without(made, "embed"), "embed.0": made["embed.weight"][:5], "embed.1": made["embed.weight"][5:]},
    )
    yield "minus zero", {**made, up.format(1): np.where(made[up.format(1)] > 0, -0.0, made[up.format(1)])}


def of_states() -> Iterator[tuple[str, tuple[Kinds, Kinds]]]:
    """Yield an optimizer's states on two sides, as tensors of a dtype: masters, buckets, names that could be states."""
    random = np.random.default_rng(11)
    narrow, w = cast(random.standard_normal((8, 6)), "BF16")
    wide = w.astype(np.float32)
    weights: Kinds = {"model.w.weight": ("BF16", narrow), "model.norm.weight": ("F32", np.ones(6, np.float32))}
    same: Kinds = {**weights, "model.w.weight": ("F32", wide)}
    master: Kinds = {"optimizer.state.w.weight.fp32": ("F32", wide)}
    moved: Kinds = {"optimizer.state.w.weight.fp32": ("F32", wide + 1)}
    yield "a master that one side lacks", ({**same, **master}, same)
    yield "a master of other values", ({**same, **moved}, same)
    yield "a wide master of a narrow weight", ({**weights, **master}, weights)
    yield "a master of another shape", ({**same, "optimizer.state.w.weight.fp32": ("F32", wide.ravel())}, same)
    yield "a master whose weight the other side has", (same, master)
    yield "masters on both sides", ({**weights, **master}, {**weights, **moved})
    for key in ("exp_avg", "step", "param", "exp_avg_sq_row"):
        state: Kinds = {f"optimizer.state.w.weight.{key}": ("F32", wide), f"optimizer.state.{key}.w": ("F32", wide)}
        yield f"states called {key}", ({**weights, **state}, weights)
    param: Kinds = {"optimizer.state.param.exp_avg": ("F32", wide), "model.param": ("F32", wide)}
    yield "a parameter called param", ({**weights, **param}, {**weights, **param})
    bucket: Kinds = {"optimizer.dp_group_idx_0.gbuf_idx_0.dtype_bucket_idx_0.exp_avg": ("F32", wide.ravel())}
    yield "states in buckets", ({**weights, **bucket}, {**weights, **bucket})
    powers = (("exp_avg", wide), ("exp_avg_sq", wide**2))
    moments: Kinds = {f"optimizer.state.w.weight.{key}": ("F32", values) for key, values in powers}
    of_norm: Kinds = {f"optimizer.state.norm.weight.{key}": ("F32", values[0]) for key, values in powers}
    trained: Kinds = {**weights, **moments, **of_norm}
    first: Kinds = {"optimizer.state.w.weight.exp_avg": ("F32", wide)}
    yield "a parameter without states", (trained, {**weights, **of_norm})
    yield "a moved weight without states", (trained, {**same, "model.w.weight": ("F32", wide + 1), **of_norm})
    yield "a weight lost with its states", (trained, {"model.norm.weight": weights["model.norm.weight"], **of_norm})
    yield "one state lost", (trained, {**weights, **first, **of_norm})
    yield "all states lost", (trained, weights)


def of_parts() -> Iterator[tuple[str, tuple[Model, Model]]]:
    """Yield tensors of which one side has some equal parts, or an end that is one number."""
    random = np.random.default_rng(14)
    made = {"w": random.standard_normal((8, 6)), "norm": random.standard_normal(6)}
    four = {"w": np.tile(made["w"], (4, 1)), "norm": np.tile(made["norm"], 4)}
    ended = {"w": made["w"], "norm": np.pad(made["norm"], (0, 18))}
    for number in (0.0, 1.0):
        short, long = (np.full(size, number) for size in (6, 24))
        yield f"four parts of {number:g}", ({**made, "alike": short}, {**made, "alike": long})
        yield f"four parts of {number:g}, others repeated", ({**made, "alike": short}, {**four, "alike": long})
        yield f"four parts of {number:g}, others padded", ({**made, "alike": short}, {**ended, "alike": long})
        yield f"an end of {number:g}", ({**made, "alike": short}, {**made, "alike": long[:-1]})
    yield "one number four times", ({**made, "scalar": np.ones(1)}, {**four, "scalar": np.ones(4)})
    yield "one number twice", ({**made, "scalar": np.ones(1)}, {**four, "scalar": np.ones(2)})
    yield "times nearly 1", ({**made, "w": made["w"] * 0.990099}, made)


def of_steps() -> Iterator[tuple[str, tuple[Model, Model, Model]]]:
    """Yield what a checkpoint has of which parts are left over from an earlier one, next to that and the right one."""
    random = np.random.default_rng(15)
    old = {"experts": random.standard_normal((4, 6, 6)), "w": random.standard_normal((8, 6))}
    new = {name: values + 0.1 * np.sin(values * 7) for name, values in old.items()}
    for what, part in (("two experts", np.s_[2:]), ("one column", np.s_[:, :, 1]), ("one element", np.s_[0, 0, :1])):
        held = {name: values.copy() for name, values in new.items()}
        held["experts"][part] = old["experts"][part]
        yield f"{what} of another step", (old, held, new)
    held = {**new, "experts": np.concatenate([new["experts"][:2], random.standard_normal((2, 6, 6))])}
    yield "two experts of no step", (old, held, new)


def trained(seed: int = 5) -> Model:
    """Return the tensors of a small model: matrices, biases and norms."""
    random = np.random.default_rng(seed)
    made: Model = {}
    for layer in range(2):
        made |= {f"layers.{layer}.{name}.weight": random.standard_normal((16, 8)) / 4 for name in ("up", "down")}
        made |= {f"layers.{layer}.up.bias": random.standard_normal(16) / 50}
        made |= {f"layers.{layer}.norm.weight": 1 + random.standard_normal(8) / 100}
        made |= {f"layers.{layer}.norm.bias": random.standard_normal(8) / 100}
    return made | {"head.weight": random.standard_normal((8, 8)) / 4, "counts": random.standard_normal(4)}


def of_training() -> Iterator[tuple[str, tuple[Model, Model]]]:
    """Yield two models of which all tensors differ in a way that training, a rank or a transfer makes, or none does."""
    made, random = trained(), np.random.default_rng(6)
    noise = {name: random.uniform(-1, 1, one.shape) for name, one in made.items()}
    made_again = {name: np.full(one.shape, float("norm.weight" in name)) for name, one in made.items()}
    moved = {name: one + 0.01 * noise[name] for name, one in made.items()}

    def half(one: Array, two: Array, at: int, of: int = 2) -> Array:
        """Return a tensor with one of several parts of its rows from another."""
        parts, others = np.array_split(one, of), np.array_split(two, of)
        return np.concatenate([others[number] if number == at else part for number, part in enumerate(parts)])

    def scaled(name: str, one: Array, factor: float, by: float = 0.001) -> Array:
        return one * (factor if one.ndim > 1 else 1) + by * noise[name]

    yield "one optimizer step", (made, moved)
    yield "changes in proportion", (made, {name: one * (1 + 0.01 * noise[name]) for name, one in made.items()})
    yield "steps of some", (made, {name: moved[name] if "up" in name else one for name, one in made.items()})
    yield "no decay", (made, {name: scaled(name, one, 1.02) for name, one in made.items()})
    yield "less decay of all", (made, {name: one * 1.05 + 0.001 * noise[name] for name, one in made.items()})
    yield (
        "decay of some",
        (made, {name: scaled(name, one, 1.02 if "up" in name else 1.0) for name, one in made.items()}),
    )
    for at, of in ((1, 2), (0, 2), (3, 4)):
        fresh = {name: half(one, made_again[name], at, of) for name, one in made.items()}
        yield f"shard {at} of {of} as made", (moved, {name: half(moved[name], fresh[name], at, of) for name in made})
    yield "shard 1 of 2 moved", (made, {name: half(one, moved[name], 1) for name, one in made.items()})
    yield "halves that differ", (made, {name: half(one, moved[name], "up" in name) for name, one in made.items()})
    gates = {name: half(one, moved[name], 1) if "up" in name else one for name, one in made.items()}
    yield "half of a fused weight", (made, gates)
    for number in (0.0, 1.0, 0.5):
        yield f"counts of {number}", (made, made | {"counts": np.full(4, number)})
    yield "zeros among others that differ", (made, moved | {"counts": np.zeros(4)})


def of_adapters() -> Iterator[tuple[str, tuple[Model, Model, Model]]]:
    """Yield a base and two models with adapters of low rank: other ones, several, or a change of full rank."""
    random = np.random.default_rng(7)
    base = {name: random.standard_normal((24, 16)) for name in ("q.weight", "v.weight")}

    def plus(*changes: Model) -> Model:
        return {name: one + sum(change[name] for change in changes) for name, one in base.items()}

    def adapter(rank: int) -> Model:
        return {name: random.standard_normal((24, rank)) @ random.standard_normal((rank, 16)) / 8 for name in base}

    last, before, full = adapter(3), adapter(3), {name: random.standard_normal((24, 16)) / 8 for name in base}
    other = {name: one["embed.weight"] for name, one in {"embed.weight": model()}.items()}
    quarter = {name: one / 4 for name, one in last.items()}
    ways = {
        "two": plus(last, before),
        "another": plus(before),
        "a change of all": plus(last, full),
        "less": plus(quarter),
    }
    for way, second in ways.items():
        yield f"adapters: {way}", tuple(made | other for made in (plus(last), second, base))  # type: ignore[misc]
    average = {name: (one + base[name]) / 2 for name, one in plus(full).items()}
    yield "adapters: an average", tuple(made | other for made in (plus(full), average, base))  # type: ignore[misc]


def _beside(made: Model, other: Model) -> Iterator[tuple[tuple[str, Array], Array]]:
    yield from (((name, one), other[name]) for name, one in made.items())


def of_values(values: Array) -> Iterator[tuple[str, Array]]:
    """Yield what may have become of the values of a tensor of any shape."""
    yield "halved", values / 2
    yield "negated", -values
    yield "plus 1", values + 1
    yield "zero", values * 0
    yield "constant", values * 0 + 0.75
    yield "not finite", np.where(values > 0.5, np.inf, values)
    yield "rounded", np.round(values * 64) / 64
    if values.size:
        one = values.copy()
        one.reshape(-1)[-1] += 0.5
        yield "one element", one
        yield "shuffled", np.random.default_rng(1).permutation(values.reshape(-1)).reshape(values.shape)
        yield "half zero", np.where(np.arange(values.size).reshape(values.shape) < values.size // 2, values, 0)
    for dim, size in enumerate(values.shape):
        if size > 1:
            yield f"dim {dim} reversed", np.flip(values, dim)
            yield f"dim {dim} shifted", np.roll(values, 1, dim)
            yield f"dim {dim} in turns", values.take([*range(0, size, 2), *range(1, size, 2)], dim)
            yield f"dim {dim} once more", values.take([0, *range(size - 1)], dim)
            yield (
                f"dim {dim} scaled",
                values * np.linspace(1, 2, size).reshape([-1 if at == dim else 1 for at in range(values.ndim)]),
            )
        if size > LOST + 2:
            rest, more = np.delete(values, LOST, dim), np.full_like(values.take([0], dim), 0.5)
            yield f"dim {dim} without an index", rest
            yield f"dim {dim} without an index, padded", np.concatenate([rest, more], dim)
            yield f"dim {dim} with another index", np.concatenate([values.take([0], dim), more, values], dim)
            yield f"dim {dim} without an index, reversed", np.flip(rest, dim)


def of_merges() -> Iterator[tuple[str, Model, Model, Model, bytes]]:
    """Yield a base, the same with an adapter merged, and the adapter with its settings."""
    random = np.random.default_rng(8)
    base, down, up = random.standard_normal((32, 24)), random.standard_normal((4, 24)), random.standard_normal((32, 4))
    adapter = {"base_model.model.w.lora_A.weight": down, "base_model.model.w.lora_B.weight": up}
    rest = {"norm.weight": random.standard_normal(16)}
    for what, scale, is_rank_stabilized in (("as is due", 8, True), ("by its rank", 4, True), ("twice", 8, False)):
        settings = json.dumps({"lora_alpha": 16, "r": 4, "use_rslora": is_rank_stabilized}).encode()
        yield what, {"w": base, **rest}, {"w": base + scale * up @ down, **rest}, adapter, settings
    yield "another", {"w": base, **rest}, {"w": base + up @ down[::-1], **rest}, adapter, settings


def of_blocks() -> Iterator[tuple[str, Array, Array]]:
    """Yield matrices of which rows, or parts of them, have factors of their own, and near misses."""
    random = np.random.default_rng(4)
    values, whole = random.standard_normal((6, 48)), random.uniform(0.5, 2, (6, 48))
    for what, width in (("halves of rows", 24), ("groups of 8 columns", 8), ("pairs of columns", 2)):
        yield f"scaled {what}", values, values * whole[:, ::width].repeat(width, 1)
    yield "scaled halves of columns", values.T, (values * whole[:, ::24].repeat(24, 1)).T
    yield (
        "scaled second half of rows",
        values,
        values * np.hstack([whole[:, :24] ** 0, whole[:, ::8][:, 3:].repeat(8, 1)]),
    )
    yield "scaled halves of rows but one", values, values * whole[:, ::24].repeat(24, 1) + (np.arange(48) == 30) * 0.01
    yield "scaled shuffled columns", values, (values * whole[:, ::24].repeat(24, 1))[:, random.permutation(48)]


def saved(made: Model, dtype: str = "F32") -> bytes:
    """Return a file of a model, in a dtype."""
    return file({name: (dtype, cast(np.asarray(one, np.float64), dtype)[0]) for name, one in made.items()})


def pairs() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the name of a pair of checkpoints, and both."""
    made = model()
    for dtype, other in (("F32", "F32"), ("BF16", "F32")):
        for what, second in of_names(made):
            if dtype == other or "a" in what[:3]:
                yield f"{dtype} {what}", saved(made, dtype), saved(second, other)
    yield from ((name, file(first), file(second)) for name, (first, second) in of_states())
    yield from ((name, saved(first), saved(second)) for name, (first, second) in of_parts())
    for shape in SHAPES:
        values = np.random.default_rng(len(shape)).standard_normal(shape)
        rest = {"norm.weight": made["norm.weight"]}
        for what, changed in of_values(values):
            name = f"{'x'.join(map(str, shape)) or 'scalar'} {what}"
            yield name, saved({"w": values, **rest}), saved({"w": changed, **rest})
    yield from ((name, saved({"w": first}), saved({"w": second})) for name, first, second in of_blocks())


def main() -> None:
    """Make the room, and judge it."""
    room = store.Room(ROOM)
    for name, (first, _) in of_states():
        room.add_content(f"{name}, checked", ("check", "{0}.safetensors"), [{"": file(first)}])
    for at, (name, first, second) in enumerate(pairs()):
        files = [{"": first}, {"": second}]
        both = "layers" in name or not name[0].isdigit()
        for turn in (files, files[::-1]) if both else ((files[::-1] if at % 2 else files),):
            room.add_content(name, ("diff", "{0}.safetensors", "{1}.safetensors"), turn)
    for name, steps in of_steps():
        old, held, new = ({"": saved(step)} for step in steps)
        command = ("diff", "{0}.safetensors", "{1}.safetensors", "--also", "{2}.safetensors")
        room.add_content(name, command, [new, held, old])
        room.add_content(name, command, [held, new, old])
    for at, (name, sides) in enumerate(of_training()):
        inputs = [{"": saved(side)} for side in (sides[::-1] if at % 2 else sides)]
        room.add_content(f"training: {name}", ("diff", "{0}.safetensors", "{1}.safetensors"), inputs)
    for name, models in of_adapters():
        command = ("diff", "{0}.safetensors", "{1}.safetensors", "--also", "{2}.safetensors")
        room.add_content(name, command, [{"": saved(each)} for each in models])
    for name, base, merged, adapter, settings in of_merges():
        folder = {"adapter_model.safetensors": saved(adapter), "adapter_config.json": settings}
        command = ("diff", "{0}.safetensors", "{1}.safetensors", "--also", "{2}")
        room.add_content(f"adapter merged: {name}", command, [{"": saved(base)}, {"": saved(merged)}, folder])
    record(room)


if __name__ == "__main__":
    main()
