"""`python -m tests.contract.by_runs`: the room `runs`, of two runs whose unsharded models are compared by sketches.

Five calls, one within another, each with an input, an output, their gradients and a weight: some of them are another
number, of another shape, not finite or a little off in one of the runs. What rounding does, dtypes, what was drawn and
which of the two lacks its sketches take turns.
"""

from __future__ import annotations

import random
import tempfile
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.arrays import sketch
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import MeshRecord
from shardviz.dump.records.trace import SketchRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from tests.contract import store
from tests.contract.by_traces import cases as traced
from tests.contract.judge import IN_MEMORY, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Point = tuple[str, Any]

ROOM = "runs"
TRACED = 6
"""Steps with a trace that are compared with each other."""
MODULES = ("layers.0", "layers.1.attn", "layers.1", "head", "")
SIDES = ("input", "output", "gradient of input", "gradient of output")
CHANGES: Mapping[str, Callable[[Array], Array]] = {
    "another": lambda values: values * 1.5 + 1,
    "twice": lambda values: values * 2,
    "of fewer rows": lambda values: values[:2],
    "not finite": lambda values: values * np.nan,
    "off by 3e-10": lambda values: values * (1 + 3e-10),
    "off by 1e-6": lambda values: values + 1e-6 * np.sin(9 * values),
    "off by 5e-5": lambda values: values + 5e-5 * np.sin(9 * values),
    "off by 1e-2": lambda values: values + 1e-2 * np.sin(9 * values),
    "off by 0.1": lambda values: values + 0.1 * np.sin(9 * values),
    "zeros": lambda values: values * 0,
}
PLACES: tuple[tuple[Point, ...], ...] = (
    *(((name, side),) for name in MODULES for side in SIDES),
    (("layers.0", "output"), ("layers.1", "input"), ("head", "output")),
    (("layers.1.attn", "input"), ("layers.1.attn", "output"), ("layers.1", "output")),
    (("layers.1.attn", "output"), ("layers.1", "output"), ("head", "input")),
    (("layers.1", "gradient of input"), ("layers.1.attn", "gradient of input")),
    (("layers.1", "gradient of input"), ("layers.0", "gradient of output"), ("", "gradient of input")),
    (("head", "gradient of output"), ("head", "gradient of input")),
    (("head.weight", "weight"),),
    (("head.weight", "weight"), ("layers.0.weight", "weight")),
    (("head.weight", "weight"), ("", "input"), ("head", "output")),
)
ROUNDINGS = (
    *(("float64", 0.0), ("float32", 0.0), ("bfloat16", 0.0)),
    *(("float32", 0.01), ("bfloat16", 0.06), ("bfloat16", 0.001), ("int8", 0.0)),
)
"""The dtype of activations, and how far rounding was seen to move them."""


def values_of(name: str, side: str) -> Array:
    """Return what a run has at a place."""
    return np.random.default_rng([len(name), len(side)]).normal(size=(4, 6))


def sketches(
    changed: Sequence[Point], by: Callable[[Array], Array], dtype: str, noise: float, drawn: Sequence[str] = ()
) -> Iterator[SketchRecord]:
    """Yield what a run's unsharded model has."""
    for order, name in enumerate(MODULES):
        for side in (*SIDES, "weight") if name else SIDES:
            called = f"{name}.weight" if side == "weight" else name
            values = values_of(name, side)
            if (called, side) in changed:
                values = by(values)
            yield SketchRecord(
                *(called, side, dtype, values.shape, sketch(values), order),  # type: ignore[arg-type]
                noise=noise if side != "weight" else 0.0,
                is_drawn=called in drawn,
            )


def run(folder: Path, made: Sequence[SketchRecord], ranks: int = 2) -> Path:
    """Write a run of few ranks, of which the first has the sketches."""
    prepare_folder(folder, force=True)
    mesh = MeshRecord(("tp",), (2,), (0, 1))
    write_run(folder, RunRecord(1, "test", "none", 2, mesh=mesh, probe="test"))
    for rank in range(2 - ranks, 2):
        own = tuple(made) if rank == 0 else ()
        write_rank(folder, RankRecord(1, rank, 2, "host", meshes=(mesh,), sketches=own))
    return folder


def cases() -> Iterator[tuple[str, list[list[SketchRecord]]]]:
    """Yield what both runs have: every change at every place, and all else in turn."""
    for at, (places, change) in enumerate(product(PLACES, CHANGES)):
        dtype, noise = ROUNDINGS[(at + at // len(CHANGES)) % len(ROUNDINGS)]
        other = ("float64", dtype, "float32")[at % 3]
        drawn = ((), (), ("head.weight",))[at % 3]
        first = list(sketches((), CHANGES[change], other, noise if at % 2 else 0.0))
        second = list(sketches(places, CHANGES[change], dtype, noise, drawn))
        if at % 7 == 3:
            first = [one for one in first if one.what != "gradient of output"]
        where = " and ".join(f"{name or 'the model'} {side}" for name, side in places)
        yield f"{where} {change}, {other} beside {dtype}, noise {noise}", [first, second][:: 1 if at % 3 else -1]


def add_others(room: store.Room, folder: Path) -> None:
    """Add runs without sketches, without a rank, and with a wrong module in the sharded step."""
    whole, odd = (list(sketches(places, CHANGES["another"], "float32", 0.0)) for places in ((), PLACES[5]))
    sides = {
        "whole": run(folder / "whole", whole),
        "other": run(folder / "other", odd),
        "no sketches": run(folder / "none", ()),
        "weights alone": run(folder / "weights", [one for one in whole if one.what == "weight"]),
        "no first rank": run(folder / "first", whole, ranks=1),
        "no input": run(folder / "input", [one for one in odd if (one.name, one.what) != ("", "input")]),
    }
    for (left, first), (right, second) in product(sides.items(), sides.items()):
        room.add(f"{left} beside {right}", ("diff", "{0}", "{1}"), [store.files_of(first), store.files_of(second)])
    steps = [step for _, step in islice(traced(), TRACED)]
    for step in steps:
        step.of_ranks[0]["sketches"] = tuple(whole)
    paths = [step.write(folder / f"{at}.shardviz") for at, step in enumerate(steps)]
    for at, number in product(range(TRACED), (0, 1, 3)):
        both = [paths[at], paths[(at + number) % TRACED]]
        room.add(f"step {at} beside step {at + number}", ("diff", "{0}", "{1}"), [*map(store.files_of, both)])


def main() -> None:
    """Make the room, and judge it; of the many cases a part drawn once is kept."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        every = list(cases())
        for at in sorted(random.Random(1).sample(range(len(every)), 110)):
            name, both = every[at]
            paths = [run(Path(folder, f"{at}.{number}"), made) for number, made in enumerate(both)]
            room.add(name, ("diff", "{0}", "{1}"), [store.files_of(path) for path in paths])
        add_others(room, Path(folder))
    record(room)


if __name__ == "__main__":
    main()
