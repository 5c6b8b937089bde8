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
from shardviz.dump.records.tensors import Body, GatherRecord, MeshRecord, Position, TensorRecord
from shardviz.dump.write import RUN_FILE
from shardviz.errors import NotationError
from shardviz.live.capture.intended import check_intended
from shardviz.testing.assertions.calls import assert_ordered
from shardviz.testing.assertions.message import ShardAssertionError
from tests.check.checking import arange, check_made, kinds, only, reordered
from tests.check.records import change_rank, change_run, read_rank, without
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.report import Report

MESH = "fsdp=2,tp=2"


def with_intent(path: Path, made: Made | str, **intended: str) -> Report:
    check_made(path, MESH, {"w": made})
    change_run(path / "made.shardviz", intended=intended)
    return check_dump(path / "made.shardviz")


def test_a_split_across_segments_is_found_by_what_was_intended(tmp_path: Path) -> None:
    found = only(with_intent(tmp_path, "[24/tp, 8]", w="[*/3/tp, *]"))
    assert (found.kind, found.held, found.intended) == ("wrong-segment", "[24/tp, 8]", "[*/3/tp, *]")
    assert "_StridedShard(0, split_factor=3)" in found.fix
    assert "pytorch#140069" in found.refs


@pytest.mark.parametrize("text", ["[24/tp, 8]", "[*/tp, *] =fsdp", "[*/1/tp, 8]", "float32[24/tp, *]"])
def test_what_is_as_intended_is_right_however_it_is_spelled(tmp_path: Path, text: str) -> None:
    report = with_intent(tmp_path, "[24/tp, 8]", w=text)
    assert (report.findings, report.not_checked) == ((), ())


def test_a_name_that_no_tensor_has_is_reported_and_fails_nothing(tmp_path: Path) -> None:
    check_made(tmp_path, MESH, {"w": "[24/tp, 8]"})
    change_run(tmp_path / "made.shardviz", intended={"w": "[24/tp, 8]", "layer.*.w": "[*/tp, *]"})
    report = check_dump(tmp_path / "made.shardviz")
    assert report.findings == ()
    assert [one.why for one in report.not_checked] == ["the layout expected for 'layer.*.w': no tensor has that name"]


def test_another_layout_than_intended_is_a_wrong_placement(tmp_path: Path) -> None:
    found = only(with_intent(tmp_path, "[24/fsdp/tp, 8]", w="[*/tp/fsdp, *]"))
    assert (found.kind, found.intended) == ("wrong-placement", "[*/tp/fsdp, *]")


@pytest.mark.parametrize(("of_run", "of_rank"), [("0a", "0b"), ("0a", ""), ("", "0b")])
def test_a_file_of_another_run_is_named_and_the_rest_is_checked(tmp_path: Path, of_run: str, of_rank: str) -> None:
    check_made(tmp_path, MESH, {"w": Made("[24/fsdp/tp, 8]", "[24/tp/fsdp, 8]")})
    change_run(tmp_path / "made.shardviz", run_id=of_run)
    for rank in range(4):
        change_rank(tmp_path / "made.shardviz", rank, run_id=of_rank if rank == 3 else of_run)
    report = check_dump(tmp_path / "made.shardviz")
    assert kinds(report) == ["misordered", "incomplete"]
    found = report.findings[1]
    assert (found.ranks, found.sentence) == ((3,), "rank_00003.json is of another run than run.json")


def test_a_plain_tensor_is_held_against_the_intention_too(tmp_path: Path) -> None:
    plain = Made(None, held="[24/tp, 8]", shape=(24, 8))
    assert kinds(with_intent(tmp_path, plain, w="[*/3/tp, *]")) == ["wrong-segment"]
    assert kinds(with_intent(tmp_path, plain, w="[*/tp, *]")) == []


def test_a_misordered_tensor_says_what_was_intended_and_is_found_once(tmp_path: Path) -> None:
    found = only(with_intent(tmp_path, Made("[8/fsdp/tp]", held="[8/tp/fsdp]"), w="[*/tp/fsdp]"))
    assert (found.kind, found.intended) == ("misordered", "[*/tp/fsdp]")


def test_segments_that_two_axes_split_are_told_what_can_be_done_about_them(tmp_path: Path) -> None:
    found = only(with_intent(tmp_path, "[24/tp/fsdp, 8]", w="[*/3/tp/fsdp, *]"))
    assert found.kind == "wrong-segment"
    assert "a Linear of its own" in found.fix
    assert "expect [(24/3/tp)/fsdp, 8]" in found.fix
    assert "_StridedShard" not in found.fix


def test_what_fsdp_makes_of_segments_that_are_split_already_can_be_intended(tmp_path: Path) -> None:
    plain = Made(None, held="[(24/3/tp)/fsdp, 8]", shape=(24, 8))
    assert kinds(with_intent(tmp_path, plain, w="[(*/3/tp)/fsdp, *]")) == []


def test_a_tensor_that_the_plan_passes_over_is_told_so(tmp_path: Path) -> None:
    found = only(with_intent(tmp_path, "[24, 8]", w="[*/tp, *]"))
    assert (found.kind, found.held) == ("wrong-placement", "[24, 8]")
    assert found.summary.endswith("every rank has all of it, nothing splits it over tp")
    assert "No entry of the plan" in found.cause


@pytest.mark.parametrize("claimed", ["[24/tp, 8]", "[24/tp/fsdp, 8]", "[24, 8/fsdp]"])
def test_an_order_that_is_meant_is_the_one_that_is_looked_for(tmp_path: Path, claimed: str) -> None:
    order = arange(24, 8).reshape(3, 8, 8)[[2, 0, 1]].reshape(24, 8)
    made = reordered(order, claimed, MESH)
    text = f"{claimed} order 0: 2 0 1"
    assert kinds(with_intent(tmp_path / "without", made, w=claimed)) != []
    report = with_intent(tmp_path / "meant", made, w=text)
    assert (report.findings, report.not_checked) == ((), ())
    assert kinds(with_intent(tmp_path / "own", claimed, w=text)) != []
    assert kinds(with_intent(tmp_path / "other", made, w=f"{claimed} order 0: 1 2 0")) != []


def test_an_order_that_does_not_fit_is_reported_as_unchecked(tmp_path: Path) -> None:
    (said,) = with_intent(tmp_path, "[24/tp, 8]", w="[*/tp, *] order 0: 0 2 1 3 4").not_checked
    assert said.why == "dim 0 of size 24 has no 5 equal blocks"


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


def test_a_tensor_that_is_meant_to_be_whole_is_not_to_be_split(tmp_path: Path) -> None:
    found = only(with_intent(tmp_path, "[24/tp, 8]", w="[24, 8]"))
    assert found.fix == "keep it whole, by (Replicate(), Replicate()), or expect [24/tp, 8]"
    split = only(with_intent(tmp_path, "[24/tp, 8]", w="[24, 8/tp]"))
    assert split.fix.startswith("split it, by (Replicate(), Shard(1)), or")


def test_a_plain_tensor_in_no_layout_is_explained_by_what_was_intended(tmp_path: Path) -> None:
    parts = [arange(24, 8)[:12], arange(24, 8)[12:]]
    made = Made(None, ids={rank: parts[source] for rank, source in enumerate([0, 1, 1, 0])}, shape=(24, 8))
    found = only(with_intent(tmp_path, made, w="[*/tp, *]"))
    assert found.kind == "wrong-placement"
    assert "the copies on fsdp=0 are in order, but on fsdp=1" in found.summary
    assert "no layout of the notation" not in found.fix


def test_an_intention_that_does_not_fit_is_reported_as_unchecked(tmp_path: Path) -> None:
    report = with_intent(tmp_path, "[24/tp, 8]", w="[*/tp]")
    assert report.findings == ()
    assert "does not fit" in report.not_checked[0].why


def test_missing_and_damaged_ranks_are_told_and_the_rest_is_checked(tmp_path: Path) -> None:
    check_made(tmp_path, MESH, {"w": Made("[8/fsdp/tp]", held="[8/tp/fsdp]")})
    folder = tmp_path / "made.shardviz"
    (folder / "rank_00003.json").unlink()
    (folder / "rank_00002.json").write_text("{")
    report = check_dump(folder)
    assert kinds(report) == ["misordered", "incomplete", "incomplete"]
    assert [finding.ranks for finding in report.findings[1:]] == [(2,), (3,)]
    assert {finding.severity for finding in report.findings[1:]} == {"warning"}


def test_a_missing_rank_loses_no_ids_of_its_own(tmp_path: Path) -> None:
    check_made(tmp_path, MESH, {"w": "[8/tp/fsdp]"})
    (tmp_path / "made.shardviz" / "rank_00001.json").unlink()
    assert kinds(check_dump(tmp_path / "made.shardviz")) == ["incomplete"]


def test_a_shard_that_one_rank_of_the_mesh_does_not_have_is_told(tmp_path: Path) -> None:
    check_made(tmp_path, MESH, {"w": "[8/tp/fsdp]", "v": "[4]"})
    without(tmp_path / "made.shardviz", rank=2, name="w")
    found = only(check_dump(tmp_path / "made.shardviz"))
    assert (found.kind, found.tensor, found.ranks) == ("incomplete", "w", (2,))


def test_a_stamped_tensor_that_no_rank_has_is_told(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=2", {"w": "[8/tp]", "v": "[4]"})
    for rank in range(2):
        without(tmp_path / "made.shardviz", rank=rank, name="v")
    found = only(check_dump(tmp_path / "made.shardviz"))
    assert (found.kind, found.tensor) == ("incomplete", "v")


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


def test_tensors_on_a_part_of_a_mesh_lose_their_mark_with_its_group(tmp_path: Path) -> None:
    check_made(tmp_path, "fsdp=2,tp=2", {"over_tp": "[8/tp]", "over_fsdp": "[8/fsdp]"})
    folder = tmp_path / "made.shardviz"
    for rank, record in read_files(folder).ranks.items():
        first, tp = rank // 2 * 2, rank % 2
        part = MeshRecord(("tp",), (2,), (first, first + 1))  # the tensor claims all of the mesh
        change_rank(folder, rank, meshes=(*record.meshes, part), positions=(Position(1, (tp,), (1 - tp,)),))
    assert ungathered(folder) == ["over_tp"]


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


def test_names_that_still_share_storage_are_tied(tmp_path: Path) -> None:
    assert tied_dump(tmp_path, ranks_that_tie=(0, 1)).findings == ()


def test_empty_shards_cannot_be_untied(tmp_path: Path) -> None:
    assert tied_dump(tmp_path, ranks_that_tie=(0,), claimed="[1/tp]").findings == ()


def test_names_on_different_stages_are_not_untied_by_the_unsharded_model_that_rank_0_runs(tmp_path: Path) -> None:
    check_made(tmp_path, "pp=2", {"a": Made(None, shape=(8,), held="[8]"), "b": Made(None, shape=(8,), held="[8]")})
    folder = tmp_path / "made.shardviz"
    tie(folder)
    for rank, name in enumerate("ab"):
        own = tuple(tensor for tensor in read_rank(folder, rank).tensors if tensor.name == name)
        change_rank(folder, rank, tensors=own)
    record = read_rank(folder, 0)
    whole = Body("grad", "reference", (8,), (8,), "float64", values=[0.0] * 8)
    both = tuple(TensorRecord(name, len(record.bodies)) for name in "ab")
    change_rank(folder, 0, bodies=(*record.bodies, whole), tensors=(*record.tensors, *both))
    report = check_dump(folder)
    assert "untied" not in {found.kind for found in report.findings}
    assert ("b", "it was tied to a, and no rank has both now") in {(one.tensor, one.why) for one in report.not_checked}


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


def test_a_gather_out_of_order_from_right_shards_is_the_collectives_fault(tmp_path: Path) -> None:
    found = only(with_gathered(tmp_path, "[4/tp]", GatherRecord("w", "full_tensor", held=(((2, 4), (0, 2)),))))
    assert (found.kind, found.claimed) == ("collective-mismatch", "[4/tp]")
    assert (
        "4 of 4 elements out of place: on rank 0, position [0] holds the element that belongs at [2]" in found.summary
    )


def test_a_gather_of_wrong_shards_is_told_as_their_consequence(tmp_path: Path) -> None:
    made = Made("[4/tp]", held="[4/2/tp]")
    found = only(with_gathered(tmp_path, made, GatherRecord("w", "full_tensor", runs=((1, 2, 2), (2, 2, 2)))))
    assert found.kind == "misordered"
    assert "full_tensor() gives 2 of 4 elements out of place" in found.summary


def test_a_gather_that_raised_is_told(tmp_path: Path) -> None:
    report = with_gathered(tmp_path, "[4/tp]", GatherRecord("w", "full_tensor", error="RuntimeError: no"))
    assert "full_tensor(), which gathers over tp, raised RuntimeError: no" in only(report).summary


def test_what_ranks_could_not_check_is_passed_on(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=2", {"w": "[8/tp]"})
    assert read_rank(tmp_path / "made.shardviz", 0).not_checked == ()
    change_rank(tmp_path / "made.shardviz", 0, not_checked=(("w", "ids collapsed in bfloat16"),))
    report = check_dump(tmp_path / "made.shardviz")
    assert report.not_checked[0].why == "ids collapsed in bfloat16 (on 1 of 2 ranks)"


@pytest.mark.parametrize(
    ("name", "why", "without_ids", "about"),
    [
        ("w", "full_tensor was not run: it would not fit", (), "gathering"),
        ("mask", "ids collapsed in bfloat16", (), "order"),
        ("mask", "its class has no full_tensor", (), "order"),
        ("mask", "torch.bool cannot hold ids", ("mask",), "no-ids"),
        ("mask", "torch.bool cannot hold ids", ("other",), "order"),
        ("", "the step", (), "run"),
    ],
)
def test_whether_an_order_was_looked_at_is_read_off_the_ids_and_not_off_a_word_in_the_reason(
    tmp_path: Path, name: str, why: str, without_ids: tuple[str, ...], about: str
) -> None:
    check_made(tmp_path, "tp=2", {"w": "[8/tp]"})
    folder = tmp_path / "made.shardviz"
    change_rank(folder, 0, not_checked=((name, why),), without_ids=without_ids)
    assert [one.about for one in check_dump(folder).not_checked] == [about]
    if about == "order":
        with pytest.raises(ShardAssertionError, match="the order of mask cannot be checked"):
            assert_ordered(folder)
    else:
        assert_ordered(folder)


def test_what_is_not_checked_comes_in_the_models_order_whichever_rank_says_it_first(tmp_path: Path) -> None:
    names = [f"layers.{index}.w" for index in range(12)]
    check_made(tmp_path, MESH, dict.fromkeys(names, "[4, 4]"))
    for rank in range(4):
        said = [(name, "too narrow") for name in names] + [("", "the step")]
        change_rank(
            tmp_path / "made.shardviz", rank, not_checked=tuple(said[::-1] if rank % 2 else said[5:] + said[:5])
        )
    not_checked = check_dump(tmp_path / "made.shardviz").not_checked
    assert [one.tensor for one in not_checked] == ["", *names]


def test_the_order_of_ranks_stands_before_what_comes_of_it(tmp_path: Path) -> None:
    check_made(tmp_path, "tp=2", {"w": Made("[4/tp, 4]", ids={0: arange(4, 4)[2:], 1: arange(4, 4)[:2]})})
    for rank in range(2):
        change_rank(tmp_path / "made.shardviz", rank, positions=(Position(0, (rank,), (1 - rank,)),))
    assert kinds(check_dump(tmp_path / "made.shardviz")) == ["rank-order", "misordered"]
