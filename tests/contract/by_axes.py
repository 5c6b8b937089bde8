"""`python -m tests.contract.by_axes`: the rooms `axes` and `roundings`, made by rule and not by a test.

`axes` has dumps of one tensor on meshes whose axes differ in size, or are three: each layout claimed, each other one
held, and what a loader does to the ids of one that is right. In every other dump the ids are an array beside the JSON.
`roundings` has pairs of checkpoints: casts between dtypes, float8 among them, by rounding and by truncation, and
changes of every size from one rounding to a half, which thresholds stand between.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from shardviz.checkpoint.comparing.one_tensor.eight_bits import ROWS
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord
from shardviz.dump.write import write_rank
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.layout.notation import parse
from tests.check.records import change_rank, change_run
from tests.contract import store
from tests.contract.changed_files import write_tensors
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Held = dict[int, Array]

MOST_ALIKE = 2
"""Dumps that are kept of those with one verdict on one mesh."""
MESHES = {text: parse_mesh(text) for text in ("x=2,y=3", "x=2,y=4", "x=4", "x=2,y=2,z=2")}
ODD_MESHES = {
    "x=2,y=3 backwards": Mesh(("x", "y"), (2, 3), (5, 4, 3, 2, 1, 0)),
    "x=2,y=2 by columns": Mesh(("x", "y"), (2, 2), (0, 2, 1, 3)),
    "x=2,y=2 of 8 ranks": Mesh(("x", "y"), (2, 2), (1, 3, 5, 7)),
}
"""Meshes whose ranks do not count up from 0."""
ODD_LAYOUTS = ("[12/x/y, 5]", "[12/x, 4/y]", "[12/y]")
FLAT = {1: ("[flat(5, 6)/x]",), 2: ("[flat(5, 6)/x/y]", "[flat(5, 6)/y/x]", "[flat(4, 6)/y]"), 3: ("[flat(5, 6)/z/x]",)}
"""Layouts of FSDP1's parameters, which are parts of a flattened tensor."""
SEGMENTS = {1: ("[24/2/x, 6]", "[24/3/x, 6]"), 2: ("[(24/y)/x, 6]", "[24/4/x/y, 6]", "[24/2/x, 6/y]")}
"""Layouts with segments, which are held where others are claimed, and the other way round."""
LAYOUTS = {
    1: ("[24/x, 6]", "[24, 6/x]", "[24, 6]", "[5/x, 4]", "[12/x]"),
    2: ("[24/x/y, 6]", "[24/y/x, 6]", "[24/x, 6/y]", "[24/y, 6/x]", "[24/y, 6]", "[5/y/x, 4]", "[24/x]"),
    3: ("[24/x/y/z, 4]", "[24/z/x, 4]", "[24/y/z, 4/x]", "[8/x, 4/z, 2/y]", "[24/z]"),
}
"""Layouts that are claimed and held, by the number of axes."""


# Dumps


def regions(mesh: Mesh, text: str) -> tuple[Held, tuple[int, ...]]:
    """Return each rank's ids, from 1, and the tensor's shape."""
    layout = parse(text).layout(mesh)
    shape = layout.index_shape
    return {rank: layout.region_of_rank(rank).flat_ids(shape) + 1 for rank in mesh.ranks}, layout.tensor_shape


def loads(mesh: Mesh, right: Held, size: int) -> Iterator[tuple[str, Held]]:
    """Yield what a wrong loader may have put where the right ids belong."""
    last = max(rank for rank, ids in right.items() if ids.size)
    yield "right", right
    yield "rows of the last rank reversed", right | {last: right[last][::-1]}
    yield "rows of all shifted by one", {rank: np.roll(ids, 1, 0) for rank, ids in right.items()}
    yield "rows interleaved", {rank: np.concatenate([ids[::2], ids[1::2]]) for rank, ids in right.items()}
    yield "halves of rows exchanged", {rank: np.roll(ids, len(ids) // 2, 0) for rank, ids in right.items()}
    first = min(right)
    if right[first].shape == right[last].shape:
        yield "first rank's on the last", right | {last: right[first].copy()}
    if len({ids.shape for ids in right.values()}) == 1:
        yield "first rank's on all", dict.fromkeys(right, right[first])
        ranks = list(right)
        yield "ranks reversed", {rank: right[other] for rank, other in zip(ranks, ranks[::-1], strict=True)}
        yield "ranks shifted", {rank: right[other] for rank, other in zip(ranks, [*ranks[1:], ranks[0]], strict=True)}
        for axis in mesh.axes:
            yield f"the first's along {axis}", {rank: right[min(_group(mesh, axis, rank))] for rank in ranks}
    for number in (1, 3):
        changed = right[last].copy().reshape(-1)
        changed[-number:] = 0
        yield f"{number} never written", right | {last: changed.reshape(right[last].shape)}
    for what, other in (("doubled", 1), ("of the next tensor", size + 1), ("of no tensor", 9 * size)):
        changed = right[last].copy().reshape(-1)
        changed[len(changed) // 2] = other
        yield f"one id {what}", right | {last: changed.reshape(right[last].shape)}
    yield "one rank's zeros", right | {last: right[last] * 0}
    yield "nothing on the last rank", right | {last: right[last][:0]}
    yield "a row less on the last rank", right | {last: right[last][:-1]}
    yield "a row more on the first rank", right | {first: np.concatenate([right[first], right[first][:1]])}
    yield "all on the first rank", right | {first: np.arange(1, size + 1)}
    if right[last].ndim > 1:
        yield "columns reversed", {rank: ids[:, ::-1] for rank, ids in right.items()}
        yield "turned", {rank: ids.swapaxes(0, 1).reshape(ids.shape) for rank, ids in right.items()}


def _group(mesh: Mesh, axis: str, rank: int) -> tuple[int, ...]:
    return next(group for group in mesh.groups(axis) if rank in group)


def dump(
    folder: Path, mesh: Mesh, claimed: str | None, held: Held, *, dense: bool, shape: tuple[int, ...] = ()
) -> Path:
    """Write a dump of two tensors, the first with these ids, maybe plain; its ids may lie beside the JSON."""
    make_dump(folder, mesh, {"w": Made(claimed, ids=held, shape=shape), "v": "[12, 2]"})
    if max(mesh.ranks) >= mesh.size:
        _add_ranks(folder, mesh)
    if dense:
        for rank, record in read_files(folder).ranks.items():
            bodies = [structs.replace(body, runs=None, dense=True) if body.runs else body for body in record.bodies]
            array = {"stamped/param/w": np.ascontiguousarray(held[rank])} if rank in held else {}
            write_rank(folder, structs.replace(record, bodies=tuple(bodies)), array)
    return folder


def _add_ranks(folder: Path, mesh: Mesh) -> None:
    """Let the run have all ranks up to the last, and those that are not on the mesh have no tensors."""
    num_ranks = max(mesh.ranks) + 1
    change_run(folder, num_ranks=num_ranks)
    for rank in range(num_ranks):
        if rank in mesh:
            change_rank(folder, rank, num_ranks=num_ranks)
        else:
            write_rank(folder, RankRecord(1, rank, num_ranks, "testhost"))


def add_dumps(room: store.Room, folder: Path) -> None:
    """Add what is claimed on each mesh, with every other layout of the same tensor and every wrong load."""
    for text, mesh in (MESHES | ODD_MESHES).items():
        layouts = (*LAYOUTS[mesh.ndim], *FLAT[mesh.ndim]) if text in MESHES else ODD_LAYOUTS
        for claimed in layouts:
            right, shape = regions(mesh, claimed)
            held = {f"held {other}": regions(mesh, other) for other in layouts if other != claimed}
            others = {name: ids for name, (ids, its_shape) in held.items() if its_shape == shape}
            for number, (name, ids) in enumerate([*others.items(), *loads(mesh, right, int(np.prod(shape)))]):
                path = dump(folder / f"{len(room.cases)}.shardviz", mesh, claimed, ids, dense=number % 2 == 0)
                room.add(f"{text} {claimed}: {name}", ("check", "{0}"), [store.files_of(path)])


def windows(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[tuple[str, Held]]:
    """Yield parts of a tensor that no layout gives: cut by hand, with a size and a step, unevenly, or padded."""
    ids, ranks = np.arange(1, int(np.prod(shape)) + 1).reshape(shape), mesh.ranks
    for size, step in ((8, 5), (6, 6), (5, 6), (9, 6), (4, 6), (6, 5)):
        yield f"{size} rows, {step} apart", {rank: ids[at * step : at * step + size] for at, rank in enumerate(ranks)}
    uneven = np.cumsum([0, 3, 9, 2, 5, 4, 1, 0])
    yield "uneven", {rank: ids[uneven[at] : uneven[at + 1]] for at, rank in enumerate(ranks[:7])}
    yield "uneven, overlapping", {rank: ids[uneven[at] : uneven[at + 1] + at] for at, rank in enumerate(ranks[:7])}
    yield "every other row", {rank: ids[at :: mesh.size] for at, rank in enumerate(ranks)}
    yield "every other column", {rank: ids[:, at :: mesh.size] for at, rank in enumerate(ranks)}
    yield "zeros on one", {rank: ids * (at > 0) for at, rank in enumerate(ranks)}
    yield "zeros behind", {rank: np.pad(ids[at * 5 : at * 5 + 5], ((0, 1), (0, 0))) for at, rank in enumerate(ranks)}


def add_others(room: store.Room, folder: Path) -> None:
    """Add segments, tensors without placements, and layouts that are intended and not held."""
    for text, claims in {"x=4": ("[24/x, 6]", "[24, 6/x]", "[24, 6]"), "x=2,y=3": LAYOUTS[2][:5]}.items():
        mesh, shape = MESHES[text], (24, 6)
        held_as = {claim: regions(mesh, claim)[0] for claim in (*claims, *SEGMENTS[mesh.ndim])}
        segments = SEGMENTS[mesh.ndim]
        dumps = [(claim, claim, ids, "") for claim, ids in held_as.items()]
        dumps += [
            (claim, held, ids, "") for claim in held_as for held, ids in held_as.items() if {claim, held} & {*segments}
        ]
        dumps += [(None, held, ids, "") for held, ids in (held_as | dict(windows(mesh, shape))).items()]
        dumps += [(claim, claim, held_as[claim], wanted) for claim in claims for wanted in held_as]
        dumps += [(None, held, ids, wanted) for held, ids in held_as.items() for wanted in claims]
        for number, (claim, held, ids, wanted) in enumerate(dumps):
            path = dump(folder / f"o{len(room.cases)}.shardviz", mesh, claim, ids, shape=shape, dense=number % 3 == 0)
            if wanted:
                change_run(path, intended={"w": wanted})
            name = f"{text} {claim or 'plain'}: held {held}{f', intended {wanted}' if wanted else ''}"
            room.add(name, ("check", "{0}"), [store.files_of(path)])


# Checkpoints

BITS: Mapping[str, tuple[int, int, int]] = {"F8_E4M3": (4, 3, 7), "F8_E5M2": (5, 2, 15), "BF16": (8, 7, 127)}
"""Of a dtype that numpy has not: the bits of its exponent and mantissa, and what is added to the exponent."""
NUMPY: Mapping[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
ROUNDING = {"F64": 2.0**-52, "F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7, "F8_E4M3": 2.0**-3, "F8_E5M2": 2.0**-2}


def values_of_codes(dtype: str) -> Array:
    """Return what each code of a narrow dtype stands for, without its sign: the finite ones, rising."""
    exponents, mantissas, bias = BITS[dtype]
    code = np.arange(1 << (exponents + mantissas))
    exponent, mantissa = code >> mantissas, code & ((1 << mantissas) - 1)
    is_small = exponent == 0
    values = (mantissa / (1 << mantissas) + ~is_small) * 2.0 ** (np.maximum(exponent, 1) - float(bias))
    is_finite = code < code[-1] if dtype == "F8_E4M3" else exponent < (1 << exponents) - 1
    found: Array = values[is_finite]
    return found


def cast(values: Array, dtype: str, *, truncated: bool = False) -> tuple[Array, Array]:
    """Return the codes and the values of numbers in a dtype: the nearest, halfway the even one; or the next below."""
    if dtype in NUMPY:
        with np.errstate(over="ignore"):
            found = values.astype(NUMPY[dtype])
        return found, found.astype(np.float64)
    known = values_of_codes(dtype)
    size = np.minimum(np.abs(values), known[-1])
    below = np.searchsorted(known, size, side="right") - 1
    above = np.minimum(below + 1, len(known) - 1)
    low, high = size - known[below], known[above] - size
    is_up = (high < low) | ((high == low) & (above % 2 == 0))
    code = below if truncated else np.where(is_up, above, below)
    width = np.uint16 if dtype == "BF16" else np.uint8
    sign = np.signbit(values).astype(width) << (8 * width().itemsize - 1)
    return (code.astype(width) | sign).astype(width), np.copysign(known[code], values)


def file(tensors: Mapping[str, tuple[str, Array]]) -> bytes:
    """Return a safetensors file of dtypes and codes."""
    header = {name: {"dtype": dtype, "shape": list(codes.shape)} for name, (dtype, codes) in tensors.items()}
    return write_tensors(header, {name: np.ascontiguousarray(codes).tobytes() for name, (_, codes) in tensors.items()})


def halfway(dtype: str) -> Array:
    """Return numbers halfway between two of a narrow dtype, and just beside."""
    step = ROUNDING[dtype]
    middle = (1 + step * (np.arange(8) + 0.5)) * 2.0 ** np.arange(-3, 5)
    return np.concatenate([middle, -middle, middle * (1 + 2.0**-20), middle * (1 - 2.0**-20)]).reshape(8, 4)


def sizes() -> Iterator[tuple[str, float]]:
    """Yield changes that thresholds stand between, relative to a value."""
    for power in range(-13, 0):
        yield from ((f"{digit}e{power}", digit * 10.0**power) for digit in (1, 3))
    yield "0.5", 0.5


def changed(values: Array, size: float) -> Iterator[tuple[str, Array]]:
    """Yield what may have been done to a tensor by a change of a size."""
    random = np.random.default_rng(5)
    one, row = np.zeros(values.shape), np.zeros(values.shape)
    one.reshape(-1)[values.size // 2], row[len(row) // 2] = 1, 1
    yield "times", values * (1 + size)
    yield "one element", values * (1 + one * size)
    yield "one row", values * (1 + row * size)
    yield "plus", values + size
    yield "noise", values * (1 + size * random.standard_normal(values.shape))


def pairs() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the name of a pair of checkpoints, and both."""
    random = np.random.default_rng(3)
    plain, rest = random.standard_normal((6, 8)), {"norm": ("F32", np.ones(5, np.float32))}
    for source, target in product(ROUNDING, ROUNDING):
        for what, values in (("plain", plain), ("halfway", halfway(target)), ("few", plain[0, :3])):
            first, exact = cast(values, source)
            for how in ("rounded", "truncated") if source != target and target in BITS else ("rounded",):
                second = cast(exact, target, truncated=how == "truncated")[0]
                name = f"{source} to {target}, {what}, {how}"
                yield name, file({"w": (source, first), **rest}), file({"w": (target, second), **rest})
                if what == "plain":
                    last = second.copy().reshape(-1)
                    last[-1] = cast(exact.reshape(-1)[-1:] * (1 + 1.5 * ROUNDING[target]), target)[0][0]
                    other = file({"w": (target, last.reshape(second.shape)), **rest})
                    yield f"{name}, one more rounding", file({"w": (source, first), **rest}), other
    for dtype in ("F64", "F32", "BF16"):
        first, exact = cast(plain, dtype)
        for text, size in sizes():
            if size >= ROUNDING[dtype] / 2:
                for what, values in changed(exact, size):
                    second = file({"w": (dtype, cast(values, dtype)[0]), **rest})
                    yield f"{dtype} {what} {text}", file({"w": (dtype, first), **rest}), second


def scales_of(values: Array, dtype: str, block: tuple[int, int], kind: str) -> tuple[Array, Array]:
    """Return the scale of each block of a matrix, as a file has it and spread over the elements."""
    rows, columns = (np.arange(size) // by for size, by in zip(values.shape, block, strict=True))
    sizes = np.zeros((rows[-1] + 1, columns[-1] + 1))
    np.maximum.at(sizes, (rows[:, None], columns[None, :]), np.abs(values))
    sizes = sizes / values_of_codes(dtype)[-1]
    if kind == "F8_E8M0":
        powers = np.ceil(np.log2(sizes))
        return (powers + 127).astype(np.uint8), (2.0**powers)[np.ix_(rows, columns)]
    codes, exact = cast(sizes, kind)
    return codes, exact[np.ix_(rows, columns)]


def quantized() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield weights beside those in eight bits with scales: of all, of rows or of blocks, rightly and with a slip."""
    values = np.random.default_rng(6).standard_normal((12, 8)) * np.linspace(0.5, 3, 12)[:, None]
    blocks = {"all": (12, 8), "rows": (1, 8), "columns": (12, 1), "blocks": (6, 4), "uneven blocks": (5, 8)}
    names = ("w_scale_inv", "w_scale", "w.scale", "w_scales", "w.scale_inv")
    kinds, wides = ("F32", "F8_E8M0", "BF16", "F16"), ("F32", "BF16", "F16", "F64")
    for at, (coded, (what, block)) in enumerate(product(("F8_E4M3", "F8_E5M2"), blocks.items())):
        kind, wide, name = kinds[at % 4], wides[at // 2 % 4], names[at % 5]
        first, exact = cast(values, wide)
        scales, spread = scales_of(exact, coded, block, kind)
        with np.errstate(over="ignore"):
            codes = cast(exact / spread, coded)[0]
        slips: dict[str, tuple[Array, Array]] = {"right": (codes, scales), "one value": (codes.copy(), scales)}
        slips["one value"][0][4, 3] ^= 0x11
        slips["a scale for more"] = codes, np.concatenate([scales, scales])
        slips["scales turned"] = codes, np.ascontiguousarray(scales[::-1, ::-1])
        slips["a flat scale"] = codes, scales.reshape(-1)
        slips["truncated"] = cast(exact / spread, coded, truncated=True)[0], scales
        slips["no scale"] = codes, scales[:0]
        if scales.size == 1:
            slips["a number"] = codes, scales.reshape(())
        for slip, (held, its) in slips.items():
            second = {"w_qdata" if at % 3 == 2 else "w": (coded, held), name: (kind, its)}
            yield f"{wide} in {coded} by {what}, {name} of {kind}, {slip}", file({"w": (wide, first)}), file(second)


def quantized_in_parts() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield weights in eight bits with scales that are too large to be compared at once, right and with a slip."""
    values = np.resize(np.random.default_rng(7).standard_normal(37), (ROWS // 1024 + 4, 1024))
    values *= 1 + np.arange(len(values))[:, None] // 100
    for what, block in (("rows", (1, 1024)), ("blocks", (128, 128))):
        first, exact = cast(values, "BF16")
        scales, spread = scales_of(exact, "F8_E4M3", block, "F32")
        codes = cast(exact / spread, "F8_E4M3")[0]
        for slip in ("right", "one value"):
            codes[-2, 5] ^= 0x11 * (slip == "one value")
            second = file({"w": ("F8_E4M3", codes), "w_scale": ("F32", scales)})
            yield f"many values by {what}, {slip}", file({"w": ("BF16", first)}), second


def whole_numbers() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield whole numbers beside the same in floats, wider or narrower than they, and beside others."""
    kinds = {"I64": np.int64, "I32": np.int32, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}
    for (kind, numpy_kind), wide in product(kinds.items(), ("F64", "F32", "BF16")):
        values = (np.arange(48) % (2 if kind == "BOOL" else 23)).reshape(6, 8).astype(np.float64)
        for what, others in (("equal", values), ("a half more", values + 0.5), ("one element", values + np.eye(6, 8))):
            first, second = (kind, values.astype(numpy_kind)), (wide, cast(others, wide)[0])
            yield f"{kind} and {wide}, {what}", file({"w": first}), file({"w": second})


def add_pairs(room: store.Room) -> None:
    """Add every pair."""
    for name, first, second in (*pairs(), *quantized(), *quantized_in_parts(), *whole_numbers()):
        command = ("diff", "{0}.safetensors", "{1}.safetensors")
        room.add_content(name, command, [{"": first}, {"": second}])


def mesh_of(name: str) -> str:
    """Return the mesh that the name of a case begins with."""
    return name.partition(" [")[0].partition(" plain")[0]


def main() -> None:
    """Make both rooms, and judge them."""
    axes, roundings = store.Room("axes"), store.Room("roundings")
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        add_dumps(axes, Path(folder))
        add_others(axes, Path(folder))
    add_pairs(roundings)
    axes.keep(chosen(judge_room(axes), MOST_ALIKE, mesh_of, ("held",)))
    for room in (axes, roundings):
        record(room)


if __name__ == "__main__":
    main()
