"""Check 10^8 ids that lie dense beside the JSON, over 8 ranks, against a numpy copy of the same bytes."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from whole import verdict

from shardviz.check.run import report_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, Stamp, TensorRecord
from shardviz.dump.write import write_rank, write_run
from shardviz.layout.mesh import Mesh
from shardviz.layout.notation import parse

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MESH = Mesh(("fsdp", "tp"), (2, 4))
SHAPE = (12_500, 8_000)
CLAIMED, HELD = "[12500/fsdp/tp, 8000]", "[12500/tp/fsdp, 8000]"
RUNS = 5


def make(folder: Path, held: str) -> list[NDArray[np.int64]]:
    """Write a dump whose ids are all dense; return the ranks' ids."""
    folder.mkdir()
    claimed, layout = parse(CLAIMED).layout(MESH), parse(held).layout(MESH)
    mesh = MeshRecord(MESH.axes, MESH.shape, MESH.ranks)
    write_run(folder, RunRecord(1, "bench", "none", MESH.size, mesh=mesh, stamps=(Stamp("w", 1, SHAPE),)))
    shards = []
    for rank, region in layout.regions():
        ids = region.flat_ids(SHAPE) + 1
        claim = LayoutRecord(0, tuple(map(str, claimed.placements() or ())), SHAPE)
        body = Body("param", "stamped", SHAPE, ids.shape, "float64", layout=0, dense=True)
        tensors = (TensorRecord("w", 0),)
        record = RankRecord(1, rank, MESH.size, "host", (mesh,), layouts=(claim,), bodies=(body,), tensors=tensors)
        write_rank(folder, record, {"stamped/param/w": ids})
        shards.append(ids)
    return shards


def main() -> None:
    """Print the speed of the check as a share of the copy's: in order, and out of order."""
    for held in (CLAIMED, HELD):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "dense.shardviz"
            shards = make(folder, held)
            copied, checked = [], []
            for _ in range(RUNS):
                start = time.perf_counter()
                copies = [ids.copy() for ids in shards]
                copied.append(time.perf_counter() - start)
                del copies
                start = time.perf_counter()
                report = report_on(dump_of(read_files(folder)))
                checked.append(time.perf_counter() - start)
            assert len(report.findings) == (held != CLAIMED), report
            copy, check = statistics.median(copied), statistics.median(checked)
            size = sum(ids.nbytes for ids in shards) / 1e9
        print(f"held {held}: copy {size / copy:.2f} GB/s, check {size / check:.2f} GB/s, reading included")
        verdict("check's speed / copy's speed", copy / check, 0.5, at_least=True)


if __name__ == "__main__":
    main()
