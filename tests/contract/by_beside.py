"""`python -m tests.contract.by_beside`: the room `besides`, of a job's weights and checkpoints, made by rule.

A job's weight is changed in every way in which `by_step` changes a result, and is compared with a checkpoint of the
right one: in one dtype or another, with the values in the dump or hashes alone, with tensors and steps beside it that
have what ranks hold. Checkpoints of three steps have one tensor of another step, of a line between two, or frozen.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.layout import Layout
from shardviz.layout.placements import parse_placement
from tests.contract import store
from tests.contract.by_axes import cast, file
from tests.contract.by_step import Step, role_of
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import LAYOUTS, MESHES, MOST_ALIKE, SHAPE, Place, R, changes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]

ROOM = "besides"
STORED = {
    "the same": lambda whole: whole,
    "more rows": lambda whole: np.concatenate([whole, np.zeros((2, *whole.shape[1:]))]),
    "fewer rows": lambda whole: whole[:-2],
    "transposed": lambda whole: whole.T,
    "flat": lambda whole: whole.reshape(-1),
    "doubled": lambda whole: np.concatenate([whole, whole]),
    "in three dims": lambda whole: whole.reshape(3, 4, 6),
}
"""Shapes in which the checkpoint may have the weight."""


def saved(tensors: Mapping[str, Array], dtype: str) -> bytes:
    """Return a file of tensors in a dtype."""
    return file({name: (dtype, cast(np.asarray(values), dtype)[0]) for name, values in tensors.items()})


def jobs() -> Iterator[tuple[str, Step, list[bytes]]]:
    """Yield a job with a weight that is changed, and the checkpoints: what it should have, and two other steps."""
    random = np.random.default_rng(11)
    weights = {name: random.standard_normal(SHAPE) for name in ("up.weight", "down.weight", "head.weight")}
    weights["down.weight"][:6] = weights["up.weight"][:6]  # half of one is half of the other
    steps = [{name: values + 0.1 * at * np.cos(values * 5) for name, values in weights.items()} for at in (1, 2)]
    names = list(dict(changes(MESHES[0])))
    kinds = (("float32", "F32"), ("float32", "BF16"), ("float32", "F16"), ("float64", "F32"), ("float16", "F32"))
    every = [(name, "the same") for name in names]
    every += [(name, stored) for stored in list(STORED)[1:] for name in ("times 1", "times 2", "last rank's zero")]
    every += [("of the step before", "the same"), ("last rank's of the step before", "the same")] * 3
    for at, (name, stored) in enumerate(every * 2):
        mesh, placements = MESHES[at % 3], (*LAYOUTS[:6], None)[at % 7]
        dtype, kind = kinds[(at // 2) % len(kinds)]
        claims = tuple(map(parse_placement, (*(R,) * (mesh.ndim - 2), *(placements or (R, R)))))
        layout = Layout.from_placements(mesh, SHAPE, claims)
        place = Place(mesh, layout, weights["up.weight"], weights["down.weight"])
        held = place.cut(cast(weights["up.weight"], kind)[1] if at % 4 < 3 else weights["up.weight"])
        earlier = place.cut(cast(steps[0]["up.weight"], kind)[1])
        if "step before" in name:
            last = max(held)
            held = earlier if name.startswith("of") else held | {last: earlier[last]}
        elif name in names:
            with np.errstate(all="ignore"):
                held = dict(changes(mesh))[name](place, held)
        step = Step(mesh)
        for other, values in weights.items():
            own = held if other == "up.weight" else place.cut(cast(values, kind)[1])
            written, claim = at % 5 != 4, layout if placements is not None else None
            step.put("param", other, "initial", own, claim, dtype=dtype, written=written)
        whole = {"up.weight": STORED[stored](weights["up.weight"]), "down.weight": weights["down.weight"]}
        if at % 3:
            whole["head.weight"] = weights["head.weight"]
        files = [saved(one, kind) for one in (whole, steps[0], steps[1])]
        way = "values" if written else "hashes"
        yield f"{name}, {stored}, {dtype} and {kind}, {placements or 'plain'}, {way}", step, files


def steps() -> Iterator[tuple[str, list[bytes]]]:
    """Yield checkpoints of three steps, of which the second has a tensor that the others tell something of."""
    random = np.random.default_rng(12)
    start = {name: random.standard_normal((16, 8)) for name in ("a", "b", "frozen")}
    ways = {"left over": 0.0, "of the next": 1.0, "the mean": 0.5, "a quarter": 0.25, "twice": 2.0, "taken off": -1.0}
    ways |= {"a third of one row": 1 / 3, "frozen": 0.0, "noise": 0.0, "constant": 0.0, "with NaN": 0.5}
    for (way, by), dtype, others in product(ways.items(), ("F32", "BF16", "F64"), ("moved", "equal", "one moved")):
        third = {name: values + 0.1 * np.sin(values * 7) for name, values in start.items()}
        third["frozen"] = start["frozen"]
        middle = {name: (start[name] + third[name]) / 2 + 0.01 for name in start} if others == "moved" else dict(third)
        middle["frozen"] = start["frozen"]
        if others == "one moved":
            middle["b"] = start["b"] * 0.9
        middle["a"] = start["a"] + by * (third["a"] - start["a"])
        if way == "a third of one row":
            middle["a"][1:] = third["a"][1:]
        if way == "noise":
            middle["a"] = random.standard_normal((16, 8))
        if way == "constant":
            middle["a"] = np.ones((16, 8))
        if way == "with NaN":
            middle["a"][3, 3] = np.nan
        if way == "frozen":
            third["a"] = start["a"]
        yield f"{way}, others {others}, {dtype}", [saved(one, dtype) for one in (start, middle, third)]


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room, suffix = store.Room(ROOM), ".safetensors"
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for at, (name, step, files) in enumerate(jobs()):
            made = store.files_of(step.write(Path(folder, f"{at}.shardviz")))
            inputs = [{path: one.read_bytes() for path, one in made.items()}, *({"": content} for content in files)]
            command = ["diff", "{0}", f"{{1}}{suffix}"]
            also = ["--also", f"{{2}}{suffix}"] if at % 2 else []
            more = ["--also", f"{{3}}{suffix}"] if at % 4 == 1 else []
            used = inputs[: 2 + len(also) // 2 + len(more) // 2]
            room.add_content(f"job {name}", [*command, *also, *more], used)
    for at, (name, files) in enumerate(steps()):
        for first, second, third in ((0, 1, 2), (1, 2, 0), (2, 1, 0)) if at % 2 else ((0, 1, 2),):
            command = ["diff", f"{{0}}{suffix}", f"{{1}}{suffix}", "--also", f"{{2}}{suffix}"]
            inputs = [{"": files[number]} for number in (first, second, third)]
            room.add_content(f"steps {name}, {first} and {second} beside {third}", command, inputs)
    room.keep(chosen(judge_room(room), MOST_ALIKE, role_of))
    record(room)


if __name__ == "__main__":
    main()
