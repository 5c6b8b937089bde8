"""`python -m tests.contract.by_map`: the room `maps`, of small checkpoints that a map converts, rightly and wrongly.

For each function of a map, on shapes whose dims differ and on square ones: what the map says, and the slips of a
conversion, such as the function left out, done twice or undone, another number, another order, another dim, one part
or one element changed, rounded, padded, missing. Each pair is compared in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.contract import store
from tests.contract.changed_files import write_tensors
from tests.contract.judge import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Tensors = Mapping[str, Array]

ROOM = "maps"


def _numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cat(*parts: Array, dim: int = 0) -> Array:
    return np.concatenate(parts, dim)


def interleave(*parts: Array, dim: int = 0, blocks: int = 0) -> Array:
    cut = [np.split(part, blocks or part.shape[dim], dim) for part in parts]
    return np.concatenate([block for turn in zip(*cut, strict=True) for block in turn], dim)


def rotary(rows: Array, head: int) -> Array:
    return rows.reshape(-1, head // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unrotary(rows: Array, head: int) -> Array:
    return rows.reshape(-1, 2, head // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def padded(part: Array, size: int, dim: int, value: float = 0.0) -> Array:
    more = [(0, size - length if at == dim else 0) for at, length in enumerate(part.shape)]
    return np.pad(part, more, constant_values=value)


@dataclass(frozen=True)
class Conversion:
    """A map of one line, with what it makes and what slips make instead.

    Attributes:
        line: The right side of the line.
        sources: The tensors that it names.
        right: What it makes.
        slips: What else a conversion may have made, by what it did.
    """

    line: str
    sources: Tensors
    right: Array
    slips: Mapping[str, Array] = field(default_factory=dict)


def conversions() -> Iterator[Conversion]:
    """Yield a conversion for each function of the language, and some of several."""
    for shape in ((24, 10), (16, 16), (24,)):
        w, head = _numbers(*shape), 12 if shape[0] == 24 else 16
        ways: dict[str, tuple[Callable[[Array, int], Array], Callable[[Array, int], Array]]] = {
            "rotary": (rotary, unrotary),
            "unrotary": (unrotary, rotary),
        }
        for name, (do, back) in ways.items():
            right = do(w, head)
            slips = {"left out": w, "undone": back(w, head), "twice": do(right, head), "other heads": do(w, 8)}
            slips["halves exchanged"] = cat(right[len(w) // 2 :], right[: len(w) // 2])
            if shape == (16, 16):
                slips |= {"transposed": right.T, "transposed before": do(w.T.copy(), head)}
            yield Conversion(f"{name}(a, {head})", {"a": w}, right, slips)
    for first, second in (((8, 6), (8, 6)), ((8, 6), (4, 6)), ((8, 8), (8, 8))):
        a, b = _numbers(*first, seed=1), _numbers(*second, seed=2)
        slips = {"other order": cat(b, a), "first twice": cat(a, a[: len(b)])}
        slips["over two ranks"] = interleave(a, b, blocks=2)
        if first == second:
            slips |= {"in turns": interleave(a, b), "added": cat(a, a + b)}
            slips |= {"other dim": cat(a, b, dim=1).reshape(16, -1)}
            yield Conversion("interleave(a, b, 0)", {"a": a, "b": b}, interleave(a, b), {"one after other": cat(a, b)})
            turns = interleave(a, b, blocks=4)
            others = {"other blocks": interleave(a, b, blocks=2), "other order": interleave(b, a, blocks=4)}
            yield Conversion("interleave(a, b, 0, 4)", {"a": a, "b": b}, turns, {**others, "in turns": cat(a, b)})
            stacked = {"other order": np.stack([b, a]), "same twice": np.stack([a, a])}
            yield Conversion("stack(a, b)", {"a": a, "b": b}, np.stack([a, b]), stacked)
            last = {"along the first": np.stack([a, b]).reshape(*first, 2), "other order": np.stack([b, a], -1)}
            yield Conversion("stack(a, b, 2)", {"a": a, "b": b}, np.stack([a, b], -1), last)
        yield Conversion("cat(a, b)", {"a": a, "b": b}, cat(a, b), slips)
        if first == second:
            yield Conversion("cat(a, b, 1)", {"a": a, "b": b}, cat(a, b, dim=1), {"other order": cat(b, a, dim=1)})
    q, k, v = _numbers(8, 6, seed=3), _numbers(4, 6, seed=4), _numbers(4, 6, seed=5)
    fused = {"k and v exchanged": cat(q, v, k), "by ranks": interleave(q, k, v, blocks=2), "k lost": cat(q, v, v)}
    fused |= {"one part halved": cat(q, k / 2, v), "one part of zeros": cat(q, k * 0, v), "reversed": cat(v, k, q)}
    fused |= {
        "v over k": cat(q, v, k * 0),
        "v over k, the rest as made": cat(q, v, k + v),
        "q over k": cat(q, q[:4], v),
    }
    yield Conversion("cat(q, k, v)", {"q": q, "k": k, "v": v}, cat(q, k, v), fused)
    groups = interleave(q, k, v, blocks=2)
    yield Conversion("interleave(q, k, v, 0, 2)", {"q": q, "k": k, "v": v}, groups, {"as a whole": cat(q, k, v)})
    for shape in ((12, 10), (12, 12)):
        w = _numbers(*shape, seed=6)
        parts = {f"part {at}": w[4 * at : 4 * at + 4] for at in (0, 2)}
        yield Conversion("split(a, 3, 1)", {"a": w}, w[4:8], {**parts, "off by one": w[5:9], "every third": w[1::3]})
        along = {"part 0": w[:, : shape[1] // 2], "every other": w[:, 1::2]}
        yield Conversion("split(a, 2, 1, 1)", {"a": w}, w[:, shape[1] // 2 :], along)
        yield Conversion("slice(a, 2, 7)", {"a": w}, w[2:7], {"off by one": w[3:8], "from the first": w[:5]})
        yield Conversion("slice(a, 2, 7, 1)", {"a": w}, w[:, 2:7], {"off by one": w[:, 1:6]})
        yield Conversion("take(a, 3)", {"a": w}, w[3], {"the next": w[4], "along the other": w[: shape[1], 3]})
        turned = {"left out": w, "other order": w[::-1].T} if shape[0] == shape[1] else {"left out": w}
        yield Conversion("transpose(a)", {"a": w}, w.T, {**turned, "same shape": w.reshape(shape[::-1])})
        more = padded(w, 16, 0)
        beyond = {"too few": w, "as a whole": np.roll(more, 1, 0), "of ones": padded(w, 16, 0, 1.0)}
        beyond["one part padded"] = cat(padded(w[:6], 8, 0), padded(w[6:], 8, 0))
        yield Conversion("pad(a, 16)", {"a": w}, more, beyond)
        yield Conversion("pad(a, 16, 1)", {"a": w}, padded(w, 16, 1), {"at the front": padded(w, 16, 1)[:, ::-1]})
    cube = _numbers(4, 6, 5, seed=7)
    turned = {"left out": cube.reshape(4, 5, 6), "all turned": cube.transpose(2, 1, 0).reshape(4, 5, 6)}
    yield Conversion("permute(a, 0, 2, 1)", {"a": cube}, cube.transpose(0, 2, 1), turned)
    yield Conversion("transpose(a, 0, 1)", {"a": cube}, cube.swapaxes(0, 1), {"left out": cube.reshape(6, 4, 5)})
    yield Conversion(
        "reshape(a, 24, -1)", {"a": cube}, cube.reshape(24, 5), {"turned": cube.swapaxes(0, 1).reshape(24, 5)}
    )
    experts = {f"e{at}": _numbers(4, 6, seed=10 + at) for at in range(4)}
    line = f"stack({', '.join(experts)})"
    ordered = list(experts.values())
    orders = {"reversed": ordered[::-1], "two exchanged": [ordered[at] for at in (0, 2, 1, 3)]}
    orders |= {"shifted": [ordered[at] for at in (1, 2, 3, 0)], "one for all": ordered[:1] * 4}
    slips = {name: np.stack(order) for name, order in orders.items()}
    slips["each transposed"] = np.stack([one.T for one in ordered]).reshape(4, 4, 6)
    slips["one changed"] = np.stack([*ordered[:3], ordered[3] + 1])
    yield Conversion(line, experts, np.stack(ordered), slips)
    line = f"stack({', '.join(f'transpose({name})' for name in experts)})"
    yield Conversion(
        line, experts, np.stack([one.T for one in ordered]), {"left out": np.stack(ordered).reshape(4, 6, 4)}
    )
    w = _numbers(12, 10, seed=6)
    yield Conversion("take(a, 3, 1)", {"a": w}, w[:, 3], {"the next": w[:, 4]})
    yield from along_others()
    yield from of_several()


def along_others() -> Iterator[Conversion]:
    """Yield conversions along another dim than the first, and of parts that differ in size along it."""
    a, b, c = _numbers(6, 8, seed=20), _numbers(6, 8, seed=21), _numbers(6, 4, seed=22)
    both, three = {"a": a, "b": b}, {"a": a, "b": b, "c": c}
    turns = interleave(a, b, dim=1)
    slips = {"one after the other": cat(a, b, dim=1), "other order": interleave(b, a, dim=1)}
    slips |= {"rows in turns": interleave(a, b).reshape(6, 16), "first twice": interleave(a, a, dim=1)}
    yield Conversion("interleave(a, b, 1)", both, turns, {**slips, "in blocks": interleave(a, b, dim=1, blocks=4)})
    blocks = interleave(a, b, dim=1, blocks=2)
    yield Conversion("interleave(a, b, 1, 4)", both, blocks, {**slips, "in turns": turns})
    yield Conversion(
        "interleave(a, b)", both, interleave(a, b), {"other dim": turns.reshape(12, 8), "other": cat(a, b)}
    )
    joined = cat(a, b, c, dim=1)
    slips = {"other order": cat(b, a, c, dim=1), "last first": cat(c, a, b, dim=1), "reversed": cat(c, b, a, dim=1)}
    slips |= {"one part halved": cat(a, b / 2, c, dim=1), "one part of zeros": cat(a, b * 0, c, dim=1)}
    slips |= {"in turns": interleave(a, b, c, dim=1, blocks=2), "one twice": cat(a, a, c, dim=1)}
    yield Conversion("cat(a, b, c, 1)", three, joined, slips)
    yield Conversion(
        "stack(a, b, 1)", both, np.stack([a, b], 1), {"other": np.stack([b, a], 1), "same": np.stack([a, a], 1)}
    )
    yield Conversion("slice(a, 1, 4)", {"a": a}, a[1:4], {"every other": a[::2], "reversed": a[3:0:-1]})


def of_several() -> Iterator[Conversion]:
    """Yield conversions of several functions, and of parts that are numbered."""
    a, b = _numbers(8, 6, seed=23), _numbers(4, 6, seed=24)
    both, turned = {"a": a, "b": b}, rotary(a, 4)
    slips = {"left out": cat(a, b), "other heads": cat(rotary(a, 8), b), "undone": cat(unrotary(a, 4), b)}
    slips |= {"other order": cat(b, turned), "one halved": cat(turned, b / 2), "of both": rotary(cat(a, b), 4)}
    yield Conversion("cat(rotary(a, 4), b)", both, cat(turned, b), slips)
    slips = {"left out": cat(a, b).reshape(6, 12), "other order": cat(b, a).T, "one halved": cat(a, b / 2).T}
    yield Conversion("transpose(cat(a, b))", both, cat(a, b).T, slips)
    halves = cat(a[4:], a[:4])
    yield Conversion(
        "cat(split(a, 2, 1), split(a, 2, 0))", {"a": a}, halves, {"left out": a, "first twice": cat(a[:4], a[:4])}
    )
    more = padded(cat(a, b), 16, 0)
    slips = {"in between": cat(padded(a, 12, 0), b), "other order": padded(cat(b, a), 16, 0), "too few": cat(a, b)}
    yield Conversion("pad(cat(a, b), 16)", both, more, slips)
    numbered = {f"e.{at}": _numbers(4, 6, seed=30 + at) for at in range(4)}
    parts = list(numbered.values())
    orders = {
        "reversed": parts[::-1],
        "two exchanged": [parts[at] for at in (0, 2, 1, 3)],
        "one for all": parts[:1] * 4,
    }
    orders |= {"shifted": [*parts[1:], parts[0]], "one changed": [*parts[:3], parts[3] + 1]}
    orders["one turned"] = [*parts[:3], parts[3][::-1]]
    for name, join in (("cat", cat), ("stack", lambda *every: np.stack(every))):
        slips = {slip: join(*order) for slip, order in orders.items()}
        yield Conversion(f"{name}(e.*)", numbered, join(*parts), slips)
    yield Conversion("cat(e.*, 1)", numbered, cat(*parts, dim=1), {"reversed": cat(*parts[::-1], dim=1)})


MISFITS = (
    *(
        "split(a, 5, 0)",
        "split(a, 3, 3)",
        "split(a, 0, 0)",
        "split(a, 2, 0, 2)",
        "split(a, 2, -1)",
        "split(v, 2, 0, 1)",
    ),
    *("slice(a, 5, 2)", "slice(a, 0, 99)", "slice(a, -1, 2)", "slice(a, 0, 2, -3)", "slice(a, 0, 2, 5)"),
    *("take(a, 12)", "take(a, -1)", "take(a, 0, 2)", "take(a, *)", "take(a, heads)"),
    *(
        "transpose(v)",
        "transpose(a, 0, 5)",
        "transpose(a, -3, 0)",
        "permute(a, 0, 0)",
        "permute(a, 1)",
        "permute(v, 0, 1)",
    ),
    *("reshape(a, 7, -1)", "reshape(a, -1, -1)", "reshape(a, -2, 60)", "reshape(a, 0, -1)", "reshape(a, 12, 11)"),
    *(
        "stack(a, b)",
        "stack(a, v)",
        "stack(a, a, 3)",
        "stack(a, a, -4)",
        "cat(a, b)",
        "cat(a, v)",
        "cat(a, a, 2)",
        "cat(v, v, 1)",
    ),
    *(
        "interleave(a, b)",
        "interleave(a, a, 0, 5)",
        "interleave(a, a, 2)",
        "interleave(a, v)",
        "interleave(a, a, 0, 0)",
    ),
    *(
        "pad(a, 4)",
        "pad(a, 16, 2)",
        "pad(v, 3)",
        "rotary(a, 7)",
        "rotary(a, 5)",
        "rotary(a, 0)",
        "unrotary(v, 3)",
        "rotary(v, 24)",
    ),
    *(
        "cat(part.*)",
        "stack(part.*)",
        "cat(hole.*)",
        "stack(hole.*)",
        "cat(none.*)",
        "cat(late.*)",
        "cat(a, a, a, a, b)",
    ),
    *(
        "transpose(stack(a, b))",
        "cat(split(a, 5, 0), b)",
        "cat(split(a, 2, 0), split(a, 2, 1))",
        "transpose(*)",
        "none",
        "part.*",
    ),
)
"""What a map may say that does not fit: numbers out of range, shapes that differ, names that are not there."""


def misfits() -> Iterator[tuple[str, Tensors, str]]:
    """Yield maps that do not fit what they are of, as a line that must fit and as one that may be left out."""
    sources = {"a": _numbers(12, 10, seed=20), "b": _numbers(8, 9, seed=21), "v": _numbers(10, seed=22)}
    sources |= {f"part.{at}": _numbers(4, 10, seed=30 + at) for at in range(3)}
    sources |= {f"hole.{at}": _numbers(4, 10, seed=40 + at) for at in (0, 2)}
    sources |= {f"late.{at}": _numbers(4, 10, seed=50 + at) for at in (1, 2)}
    for line in MISFITS:
        yield f"w = {line}", sources, f"w = {line}\n"
        yield f"w ?= {line}", sources, f"w ?= {line}\n"
    rules = {
        "taken before": "* = *\nw = a\n",
        "taken twice": "w = a\nw = v\n",
        "taken where it lacks something": "w ?= none\nw = a\n",
        "lacking twice": "w ?= cat(none, a)\nw ?= cat(other, a)\n",
        "one of a name that is not there": "x = a\n",
        "the first with a star": "l.* = transpose(*)\n",
        "not needed": "w = a\n- = b\n- = part.*\n",
        "alone": "w\n",
        "everything": "* = *\n",
        "a word for a number": "w = split(a, heads, 0)\n",
    }
    yield from ((name, sources, text) for name, text in rules.items())


def _any_slips(right: Array) -> Iterator[tuple[str, Array]]:
    """Yield what may have become of any tensor."""
    one = right.copy()
    one.reshape(-1)[right.size // 2] *= 1 + 1e-3
    least = right.copy()
    least.reshape(-1)[-1] = np.nextafter(least.reshape(-1)[-1], np.float32(9))
    lost = right.copy()
    lost[len(lost) // 2 :] = 0
    yield from {"one element": one, "one bit": least, "second half zero": lost, "halved": right / 2}.items()
    yield from {"zero": right * 0, "rows reversed": right[::-1], "shifted by one": np.roll(right, 1, 0)}.items()
    yield from {"plus 1": right + 1, "not finite": np.where(right > 1, np.nan, right)}.items()
    if right.ndim > 1:
        yield from {"turned": right.swapaxes(0, 1).reshape(right.shape), "last dim reversed": right[..., ::-1]}.items()


def saved(tensors: Tensors, dtype: str = "F32") -> bytes:
    """Return a file of some tensors, in a dtype."""
    header, data = {}, {}
    for name, one in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(one.shape)}
        bits = np.ascontiguousarray(one, np.float32).view(np.uint32)
        narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        data[name] = narrow.tobytes() if dtype == "BF16" else bits.tobytes()
    return write_tensors(header, data)


def main() -> None:
    """Make the room, and judge it."""
    room = store.Room(ROOM)
    rest = {"norm": _numbers(7, seed=99), "bias": _numbers(5, seed=98)}
    for number, one in enumerate(conversions()):
        sources, rows = saved({**rest, **one.sources}), f"w = {one.line}\n".encode()
        slips = {"right": one.right, **one.slips, **dict(_any_slips(one.right))}
        made = {name: saved({**rest, "w": array}) for name, array in slips.items()}
        made["rounded"] = saved({**rest, "w": one.right}, "BF16")
        made["missing"] = saved(rest)
        for at, (name, content) in enumerate(made.items()):
            files = [{"": content}, {"": sources}]
            if at % 3 == 2:
                files.reverse()
            command = ("diff", "{0}.safetensors", "{1}.safetensors", "--map", "{2}.map")
            shape = "x".join(map(str, one.right.shape))
            room.add_content(f"{number} {one.line} of {shape}: {name}", command, [*files, {"": rows}])
    for name, sources, text in misfits():
        first = saved({"w": sources["a"], **rest})
        command = ("diff", "{0}.safetensors", "{1}.safetensors", "--map", "{2}.map")
        room.add_content(
            f"misfit: {name}", command, [{"": first}, {"": saved({**rest, **sources})}, {"": text.encode()}]
        )
    for family in ("llama", "lama", "no such map"):
        files = [{"": saved({**rest, "w": rest["norm"]})}, {"": saved(rest)}]
        room.add_content(f"the map {family}", ("diff", "{0}.safetensors", "{1}.safetensors", "--map", family), files)
    record(room)


if __name__ == "__main__":
    main()
