"""What is wrong with a run as a whole: intentions, missing files, group order, ties, torch's own gathers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace

from shardviz.check.run import check_dump, report_on
from shardviz.check.verdicts import captured, verdict_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RunRecord
from shardviz.dump.records.tensors import GatherRecord, MeshRecord, Position
from shardviz.dump.write import RUN_FILE
from shardviz.errors import NotationError
from shardviz.live.capture.intentions import check_intended
from tests.check.checking import check_made, only
from tests.check.records import change_rank, change_run

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.report import Report
    from tests.dumps import Made

MESH = "fsdp=2,tp=2"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[*] order 0: 0 2", "'0 2' does not name every block from 0 once"),
        ("[*] order 0: view(2, 3).transpose(1, 2)", "transposes dim 2 of 2"),
        ("[*] order 0: backwards", "'backwards' does not name every block from 0 once"),
    ],
)
def test_an_order_that_cannot_be_read_is_refused_before_a_run(text: str, why: str) -> None:
    with pytest.raises(NotationError, match=re.escape(why)):
        check_intended({"w": text})


def test_group_ranks_that_are_not_coordinates_are_found(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=2", {"w": "[8/tp]"})
    for rank in range(2):
        change_rank(tmp_path / "made.shardviz", rank, positions=(Position(0, (rank,), (1 - rank,)),))
    found = only(check_dump(tmp_path / "made.shardviz"))
    assert (found.kind, found.ranks) == ("rank-order", (0, 1))
    assert "rank 0 is tp=0 but number 1 of its group" in found.summary
    assert "lists its ranks in a different order" in found.cause, "the mesh's ranks rise"


def test_only_tensors_over_an_axis_whose_group_is_in_another_order_lose_their_mark(tmp_path: Path) -> None:
    check_made(
        tmp_path, MESH, {"over_tp": "[8/tp]", "over_both": "[8/tp/fsdp]", "over_fsdp": "[8/fsdp]", "copied": "[8]"}
    )
    for rank in range(4):
        fsdp, tp = divmod(rank, 2)
        change_rank(tmp_path / "made.shardviz", rank, positions=(Position(0, (fsdp, tp), (fsdp, 1 - tp)),))
    dump = dump_of(read_files(tmp_path / "made.shardviz"))
    report = report_on(dump)
    marks = {name: verdict_on(dump, tensor, [name], report) for tensor in captured(dump) for name in tensor.names}
    assert marks == {"over_tp": "unknown", "over_both": "unknown", "over_fsdp": "good", "copied": "good"}


def ungathered(folder: Path) -> list[str]:
    return [one.tensor for one in check_dump(folder).not_checked if one.about == "gathering"]


def test_tensors_on_another_mesh_of_the_same_axis_keep_their_mark(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=2", {"good": "[8/tp]", "bad": "[6/tp]"})
    folder = tmp_path / "made.shardviz"
    for rank, record in read_files(folder).ranks.items():
        by_hand = MeshRecord(("tp",), (2,), (1, 0))
        change_rank(
            folder,
            rank,
            meshes=(*record.meshes, by_hand),
            layouts=tuple(replace(one, mesh=int(one.shape == (6,))) for one in record.layouts),
            positions=(Position(0, (rank,), (rank,)), Position(1, (1 - rank,), (rank,))),
        )
    assert ungathered(folder) == ["bad"]


def tie(folder: Path) -> None:
    """Say that in the unsharded model all others shared a's storage."""
    run = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunRecord)
    first, *others = run.stamps
    change_run(folder, stamps=(first, *(replace(one, first=first.first, tied_to=first.name) for one in others)))


def tied_dump(path: Path, *, ranks_that_tie: tuple[int, ...], claimed: str = "[8/tp]") -> Report:
    check_made(path, "tp=2", {"a": claimed, "b": claimed})
    folder = path / "made.shardviz"
    tie(folder)
    for rank in ranks_that_tie:
        change_rank(folder, rank, tied=(("a", "b"),))
    return check_dump(folder)


def test_names_that_do_not_share_storage_any_more_are_untied(tmp_path: Path) -> None:
    found = only(tied_dump(tmp_path, ranks_that_tie=(0,)))
    assert (found.kind, found.tensors, found.ranks) == ("untied", ("b", "a"), (1,))
    assert [one.sentence.partition(" before")[0] for one in found.each] == [
        "b shared storage with a",
        "a shared storage with b",
    ]


def with_gathered(path: Path, made: Made | str, gathered: GatherRecord) -> Report:
    check_made(path, "tp=2", {"w": made})
    for rank in range(2):
        change_rank(path / "made.shardviz", rank, gathered=(gathered,))
    return check_dump(path / "made.shardviz")


@pytest.mark.parametrize(
    "gathered",
    [{"held": (((0, 4),),)}, {"held": (((0, 1), (1, 4)),)}, {"runs": ((1, 1, 4),)}, {"runs": ((1, 1, 2), (3, 1, 2))}],
)
def test_a_gather_in_order_is_right_however_it_is_written_down(tmp_path: Path, gathered: dict[str, Any]) -> None:
    assert with_gathered(tmp_path, "[4/tp]", GatherRecord("w", "full_tensor", **gathered)).findings == ()
