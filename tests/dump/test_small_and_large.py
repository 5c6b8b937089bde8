"""A dump of a few bytes that stands for gigabytes: refused, or not checked and said so, at once in little memory."""

from __future__ import annotations

import re
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardviz.check.run import check_dump
from shardviz.cli import main
from shardviz.dump import read
from shardviz.dump.arrays import MAX_DENSE, MAX_ELEMENTS, MAX_OF_ALL, most_ids, own_ids
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, Stamp, TensorRecord
from shardviz.dump.write import write_rank, write_run
from shardviz.errors import LayoutError
from shardviz.layout.region import MAX_LAID_OUT, Region
from tests.dump.samples import put, refusal, spoil
from tests.lanes import nightly

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardviz.check.report import Report

MESH = MeshRecord(("tp",), (2,), (0, 1))


def files(
    folder: Path, stamped: tuple[int, ...], shape: tuple[int, ...], local: tuple[int, ...], **content: Any
) -> Path:
    """Write a tensor of two ranks, split over its first dim as it says."""
    folder.mkdir()
    write_run(folder, RunRecord(1, "test", "none", 2, mesh=MESH, stamps=(Stamp("w", 1, stamped),)))
    for rank in range(2):
        layouts = (LayoutRecord(0, ("Shard(0)",), shape),)
        here = {field: of(rank) for field, of in content.items()}
        body = Body("param", "stamped", shape, local, "float32", layout=0, **here)
        tensors = (TensorRecord("w", 0),)
        write_rank(folder, RankRecord(1, rank, 2, "h", (MESH,), layouts=layouts, bodies=(body,), tensors=tensors))
    return folder


def cheaply(work: Callable[[], Report], *, seconds: float = 1, megabytes: int = 20) -> Report:
    work()  # what is imported at the first time is not counted
    tracemalloc.start()
    started = time.process_time()
    try:
        report = work()
        assert time.process_time() - started < seconds
        assert tracemalloc.get_traced_memory()[1] < megabytes << 20
    finally:
        tracemalloc.stop()
    return report


def test_a_run_of_very_many_ids_is_not_laid_out_which_is_reported(tmp_path: Path) -> None:
    side = 1 << 14
    path = files(
        tmp_path / "d", (side, side), (side, side), (side // 2, side), runs=lambda rank: ((1, 1, side * side // 2),)
    )
    report = cheaply(lambda: check_dump(path))
    assert [unchecked.why for unchecked in report.not_checked] == [
        f"w: rank 0 holds 134,217,728 ids, more than {MAX_ELEMENTS:,}"
    ]


def test_runs_of_many_ids_are_laid_out(tmp_path: Path) -> None:
    side = 1 << 10
    half = side * side // 2
    path = files(
        tmp_path / "d",
        (side, side),
        (side, side),
        (side // 2, side),
        runs=lambda rank: ((half * (2 - rank), -1, half),),
    )
    report = check_dump(path)
    assert [finding.kind for finding in report.findings] == ["misordered"]
    assert not report.not_checked


def test_how_many_are_laid_out_depends_on_how_many_ranks_there_are() -> None:
    assert most_ids(1, dense=False) == MAX_ELEMENTS
    assert 1024 * most_ids(1024, dense=False) == MAX_OF_ALL
    assert most_ids(1024, dense=True) == MAX_DENSE, "what lies beside the JSON is as long as it says"


def test_ids_count_from_1_within_their_own_tensor() -> None:
    ids = np.array([[9, 20], [8, 21], [0, -1]])
    assert own_ids(ids, 9, 12).tolist() == [[1, 12], [-9, -22], [0, -1]]
    assert [own_ids(np.array(number), 9, 12).tolist() for number in (9, 8, 0)] == [1, -9, 0], "of no dims"


def test_a_global_shape_that_is_much_too_large_is_reported_without_laying_it_out(tmp_path: Path) -> None:
    shape = (12, (1 << 28) + 1)
    held = {"held": lambda rank: (((rank * 6, rank * 6 + 6),), ((0, 12),))}
    path = files(tmp_path / "d", shape, (12, 12), (6, 12), **held)
    (finding,) = cheaply(lambda: check_dump(path)).findings
    assert finding.kind == "wrong-shape"
    assert f"the unsharded model has {list(shape)}" in finding.sentence


def test_a_long_dim_in_order_does_not_hide_the_short_one_that_is_not(tmp_path: Path) -> None:
    """Rows are flipped under Shard(0): each rank holds the other's half, backwards."""
    long = 1 << 40
    rows = {"held": lambda rank: ((((3 - 2 * rank), 4 - 2 * rank), ((2 - 2 * rank), 3 - 2 * rank)), ((0, long),))}
    path = files(tmp_path / "d", (4, long), (4, long), (2, long), **rows)
    (finding,) = cheaply(lambda: check_dump(path)).findings
    assert "dim 0 is reversed" in finding.summary


def test_a_region_is_laid_out_up_to_a_limit() -> None:
    assert Region.whole((3, 2)).flat_ids((3, 2)).shape == (3, 2)
    shape = (MAX_LAID_OUT + 1, 3)
    with pytest.raises(LayoutError, match="elements, more than"):
        Region.whole(shape).flat_ids(shape)


def test_names_are_bounded_by_what_they_are_written_out(restored: Path) -> None:
    many = {"name": "x" * 3000 + ".", "body": 4, "numbers": [[0, 1 << 19]], "suffix": ".w"}
    spoil(restored / "rank_00001.json", lambda rank: rank["tensors"].append(many))
    assert re.search("names are 1,574,[0-9,]+ characters written out, expected at most", refusal(restored).message)
    spoil(restored / "rank_00001.json", put([[0, 1000]], "tensors", -1, "numbers"))
    assert len(read.read_files(restored).ranks[1].tensors) == 9


def test_a_file_of_gigabytes_is_not_read(restored: Path) -> None:
    path = restored / "rank_00001.json"
    with path.open("r+b") as file:
        file.truncate(3 << 30)  # sparse: it takes no room on the disk
    error = refusal(restored)
    assert error.message == f"{path} is 3,221,225,472 bytes, more than the 1,073,741,824 that are read"
    assert "--values" in error.hint


def test_where_memory_ends_one_line_says_so(
    restored: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_args: object, **_more: object) -> None:
        raise MemoryError("Unable to allocate 30.0 GiB")

    monkeypatch.setattr("shardviz.commands.common.dumps.read_parts", full)
    assert main(["check", str(restored)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", "shardviz: error: not enough memory")


@nightly
def test_a_label_of_very_many_segments_is_judged_by_its_shape(tmp_path: Path) -> None:
    rows = (1 << 59) + 1
    quarter = 1 << 57
    held = {"held": lambda rank: (((rank * quarter, rank * quarter + quarter),), ((0, 2),))}
    path = files(tmp_path / "d", (rows, 2), (rows, 2), (quarter, 2), **held)
    for rank in range(2):
        label = ["_StridedShard(0, split_factor=65536)"]
        spoil(path / f"rank_0000{rank}.json", put(label, "layouts", 0, "placements"))
    found = cheaply(lambda: check_dump(path), seconds=5, megabytes=200).findings
    assert "wrong-shape" in [finding.kind for finding in found]


def test_segments_that_no_label_can_have_are_not_looked_for(tmp_path: Path) -> None:
    """Every other of 2^40 rows, or so it begins: as a number of segments that would be half of them."""
    rows = 1 << 40
    held = {"held": lambda rank: (((rank, rank + 1), (rank + 2, rows // 2 + 1 + rank)), ((0, 2),))}
    path = files(tmp_path / "d", (rows, 2), (rows, 2), (rows // 2, 2), **held)
    report = cheaply(lambda: check_dump(path))
    assert report.findings or report.not_checked


@nightly
def test_shards_too_large_to_be_laid_out_are_misordered_all_the_same(tmp_path: Path) -> None:
    """Blocks of columns exchanged in another way on each rank: no rule over whole ranges fits."""
    side, end = 1 << 20, (1 << 20) - 1
    held = {
        "held": lambda rank: (((rank * side, rank * side + side),), ((1, end), (0, 1), (end, side))[:: 1 - 2 * rank])
    }
    path = files(tmp_path / "d", (2 * side, side), (2 * side, side), (side, side), **held)
    (finding,) = cheaply(lambda: check_dump(path), seconds=3, megabytes=200).findings
    assert (finding.kind, finding.held) == ("misordered-within-shard", "scrambled")
