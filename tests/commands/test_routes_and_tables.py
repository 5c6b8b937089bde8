"""`explain A B`, and `show` with --memory, --comms and --schedule: what they print, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.cli import main
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.step import CollectiveRecord, StageRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A dump of two stages that ran two micro-batches."""
    path = prepare_folder(tmp_path / "dump")
    write_run(path, RunRecord(1, "test", "none", 2))
    passes = [(0, False), (1, False), (0, True), (1, True)]
    for rank in range(2):
        schedule = tuple(StageRecord(rank, microbatch, backward) for microbatch, backward in passes)
        sent = (CollectiveRecord("recv", ("pp",), 2, count=2, bytes=64),)
        write_rank(path, RankRecord(1, rank, 2, "testhost", collectives=sent, schedule=schedule))
    return path


def test_a_route_is_explained_with_its_bytes_and_torchs_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "[8, 8/b] +a", "[8, 8]", "--mesh", "a=2,b=2"]) == 0
    assert capsys.readouterr().out == (
        "float32[8, 8/b] +a to float32[8, 8]  on mesh (a=2, b=2)\n"
        "\n"
        "cheapest: each rank receives up to 256 B\n"
        "  collective  over  gives     received\n"
        "  all_reduce  a     [8, 8/b]     128 B\n"
        "  all_gather  b     [8, 8]       128 B\n"
        "\n"
        "! torch's redistribute takes a different route: each rank receives up to 384 B, 1.5 times as much\n"
        "  collective  over  gives      received\n"
        "  all_gather  b     [8, 8] +a     128 B\n"
        "  all_reduce  a     [8, 8]        256 B\n"
    )


def test_a_route_that_torch_takes_too_is_reported_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "[12/tp, 12]", "[*, */tp]", "--mesh", "tp=4"]) == 0
    told = capsys.readouterr().out
    assert "all_to_all  tp    [12, 12/tp]     108 B" in told
    assert told.endswith("✓ torch's redistribute takes the same route\n")


def test_a_route_to_a_pending_sum_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "[12, 12]", "[12, 12] +tp", "--mesh", "tp=4"]) == 2
    assert "no collective makes a sum pending over tp" in capsys.readouterr().err


def test_a_schedule_is_drawn_with_its_bubble(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(pipeline), "--schedule"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "rank 0   a0 a1 ·  ·  ·  A0=== A1===",
        "rank 1   ·  a0 a1 A0=== A1=== ·  ·",
    ]


def test_the_bubble_stands_beside_the_formula(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", str(pipeline), "--schedule"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "bubble 33.3% of the time; formula (p - 1) / (v m + p - 1) = 1 / (2 + 1) = 33.3%"


def test_comms_are_printed_by_axis(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(pipeline), "--comms"]) == 0
    assert capsys.readouterr().out.startswith("along pp: each rank receives up to 64 bytes\n")


def test_a_dump_without_tensors_has_no_memory_to_show(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(pipeline), "--memory"]) == 0
    assert capsys.readouterr().out == "the dump has no tensors that take memory\n"


def test_a_table_is_of_the_whole_dump(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(pipeline), "up.weight", "--memory"]) == 2
    assert "print the whole dump as text" in capsys.readouterr().err
