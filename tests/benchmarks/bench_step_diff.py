"""Compare the traces of two runs against a bare json parse of the same files, whole processes.

python tests/benchmarks/bench_step_diff.py    1,000 modules on 64 ranks: alike; one wrong module in the second run
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from whole import compare, python, verdict

from shardviz.dump.arrays import sketch
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, TensorRecord
from shardviz.dump.records.trace import PointRecord, SketchRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run

MODULES, RANKS, LAYERS = 1000, 64, 100
SIDES = ("input", "output", "gradient of input", "gradient of output")
PARSE = (
    "import json, pathlib\nfor path in {!r}:\n"
    "    for file in pathlib.Path(path).glob('*.json'): json.loads(file.read_bytes())"
)
DIFF = "from shardviz.cli import main; assert main(['diff', {!r}, {!r}]) in (0, 1, 2)"


def main() -> None:
    """Print the ratios."""
    with tempfile.TemporaryDirectory() as parent:
        one = _written(Path(parent) / "one", odd_from=MODULES)
        alike = _written(Path(parent) / "alike", odd_from=MODULES)
        wrong = _written(Path(parent) / "wrong", odd_from=MODULES // 2)
        for name, other in (("alike", alike), ("a wrong module", wrong)):
            parse, diff = compare(python(PARSE.format((one, other))), python(DIFF.format(one, other)))
            print(f"diff: {diff}\njson parse of the same files: {parse}")
            verdict(f"two traces, {name}: diff / json parse", diff.median / parse.median, 3.0)


def _written(path: Path, odd_from: int) -> str:
    """Write the trace of a step in which every module from one on is wrong."""
    folder = prepare_folder(path)
    mesh = MeshRecord(("dp", "tp"), (8, 8), tuple(range(RANKS)))
    write_run(folder, RunRecord(1, "bench", "none", RANKS, mesh=mesh, probe="bench"))
    names = [f"layers.{at // (MODULES // LAYERS)}.part{at % (MODULES // LAYERS)}" for at in range(MODULES)]
    random = np.random.default_rng(0)
    sketches = tuple(
        SketchRecord(name, side, "float32", (8, 16), sketch(random.normal(size=(8, 16))), order)
        for order, name in enumerate(names)
        for side in SIDES
    )
    for rank in range(RANKS):
        trace = tuple(
            PointRecord(
                name,
                side,
                order,
                "odd" if order >= odd_from else "right",
                tensor=2 * order + number,
                layout="" if order >= odd_from else "[8/dp, 16/tp]",
                type="Linear",
            )
            for order, name in enumerate(names)
            for number, side in enumerate(SIDES)
        )
        tensors, bodies = _output(is_first=rank == 0, off=float(odd_from < MODULES))
        own = sketches if rank == 0 else ()
        layouts = (LayoutRecord(0, ("Replicate()", "Replicate()"), (2, 4)),)
        write_rank(
            folder,
            RankRecord(
                1,
                rank,
                RANKS,
                "bench",
                meshes=(mesh,),
                layouts=layouts,
                bodies=bodies,
                tensors=tensors,
                trace=trace,
                sketches=own,
            ),
        )
    return str(folder)


def _output(*, is_first: bool, off: float) -> tuple[tuple[TensorRecord, ...], tuple[Body, ...]]:
    """Return the step's output, and on one rank the unsharded model's, which is off by a number of its own."""
    values = [[1.0 + off * 0.3, -2.0, 0.5, 3.0 + off], [0.25, 1.5 - off, -1.0, 2.0]]
    wanted = [[1.0, -2.0, 0.5, 3.0], [0.25, 1.5, -1.0, 2.0]]
    bodies = [Body("output", "step", (2, 4), (2, 4), "float32", layout=0, values=values)]
    if is_first:
        bodies.append(Body("output", "reference", (2, 4), (2, 4), "float32", values=wanted))
    return tuple(TensorRecord("output", at) for at in range(len(bodies))), tuple(bodies)


if __name__ == "__main__":
    main()
