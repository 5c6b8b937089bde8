"""Ids that are lost or held too often, and ids that are not the tensor's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.run import check_dump
from shardviz.layout.mesh import parse_mesh
from tests.check.checking import arange, check_made, kinds, only, reordered
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.explain.finding import Finding


@pytest.mark.parametrize("claimed", ["[12/tp, 4]", None])
def test_every_rank_the_first_shard_is_missing_and_duplicated(tmp_path: Path, claimed: str | None) -> None:
    first = arange(12, 4)[:3]
    made = Made(claimed, ids=dict.fromkeys(range(4), first), shape=(12, 4))
    report = check_made(tmp_path, "tp=4", {"w": made})
    assert kinds(report) == ["duplicated", "missing"]
    duplicated, missing = report.findings
    assert "36 of 48 elements are on no rank, the first at [3, 0]" in missing.summary
    assert "12 of 48 elements have up to 4 copies instead of 1" in duplicated.summary
    if claimed:
        assert "every rank along tp holds the shard of tp=0" in missing.summary
        assert missing.refs == ("vllm-gguf-plugin#103",)


@pytest.mark.parametrize("held", ["[12/tp, 4]", "[12, 4]", "[12/dp/tp, 4]", "[12, 4/dp]", "[12/tp/dp, 4]"])
def test_a_plain_tensor_claims_nothing_as_long_as_all_of_it_is_held(tmp_path: Path, held: str) -> None:
    assert check_made(tmp_path, "dp=2,tp=4", {"w": Made(None, held=held, shape=(12, 4))}).findings == ()


def test_a_plain_tensor_may_end_in_padding(tmp_path: Path) -> None:
    padded = np.concatenate([arange(10, 2), np.zeros((2, 2), np.int64)])
    ids = {rank: padded[3 * rank : 3 * rank + 3] for rank in range(4)}
    assert check_made(tmp_path, "tp=4", {"w": Made(None, ids=ids, shape=(10, 2))}).findings == ()


def test_a_hand_made_split_that_loses_the_rest_is_missing(tmp_path: Path) -> None:
    ids = {rank: arange(10, 2)[2 * rank : 2 * rank + 2] for rank in range(4)}
    found = only(check_made(tmp_path, "tp=4", {"w": Made(None, ids=ids, shape=(10, 2))}))
    assert found.kind == "missing"
    assert "4 of 20 elements are on no rank, the first at [8, 0]" in found.summary


@pytest.mark.parametrize(
    ("mesh", "axis", "rows"),
    [("tp=4,dp=2", "tp", 3), ("dp=2,tp=3", "tp", 4), ("tp=3,dp=4", "dp", 3)],
)
def test_every_rank_the_first_part_names_the_axis_that_would_make_as_many_parts(
    tmp_path: Path, mesh: str, axis: str, rows: int
) -> None:
    made = Made(None, ids=dict.fromkeys(range(12), arange(12, 4)[:rows]), shape=(12, 4))
    found = check_made(tmp_path, mesh, {"w": made}).findings[0]
    assert f"all ranks along {axis} hold the same part" in found.summary
    assert found.fix == f"choose the shard by mesh.get_local_rank('{axis}')"


def test_axes_of_one_size_may_both_have_been_meant(tmp_path: Path) -> None:
    made = Made(None, ids=dict.fromkeys(range(4), arange(8, 4)[:4]), shape=(8, 4))
    found = check_made(tmp_path, "tp=2,dp=2", {"w": made}).findings[0]
    assert "along tp or dp" in found.summary
    assert "get_local_rank('tp')" in found.fix
    assert "get_local_rank('dp')" in found.fix


def test_parts_chosen_by_one_axis_of_two_name_the_other(tmp_path: Path) -> None:
    ids = {rank: arange(8, 4)[2 * (rank % 2) : 2 * (rank % 2) + 2] for rank in range(4)}
    found = only(check_made(tmp_path, "tp=2,dp=2", {"w": Made(None, ids=ids, shape=(8, 4))}))
    assert (found.kind, found.fix) == ("missing", "choose the shard by mesh.get_local_rank('tp')")


@pytest.mark.parametrize(("mesh", "copies"), [("dp=2,tp=2", 2), ("dp=3,tp=2", 3), ("dp=4,tp=2", 4)])
def test_one_odd_copy_of_a_part_is_counted_among_all_copies_and_named(tmp_path: Path, mesh: str, copies: int) -> None:
    ids = {rank: arange(8, 4)[4 * (rank % 2) :][:4] for rank in range(2 * copies)}
    assert check_made(tmp_path / "right", mesh, {"w": Made(None, ids=ids, shape=(8, 4))}).findings == ()
    found = only(check_made(tmp_path / "odd", mesh, {"w": Made(None, ids=ids | {3: ids[0]}, shape=(8, 4))}))
    assert found.kind == "duplicated"
    assert f"16 of 32 elements have up to {copies + 1} copies instead of {copies}" in found.summary
    assert "of dim 0 cut over tp, rank 3 holds the shard of rank 2; all other ranks hold their own" in found.summary
    assert "overlapping" not in found.cause


def test_one_odd_copy_of_a_shard_is_told_once(tmp_path: Path) -> None:
    ids = {rank: arange(8, 4)[4 * (rank % 2) :][:4] for rank in range(4)} | {3: arange(8, 4)[:4]}
    found = only(check_made(tmp_path, "dp=2,tp=2", {"w": Made("[8/tp, 4]", ids=ids)}))
    assert found.kind == "duplicated"
    assert "16 of 32 elements have up to 3 copies instead of 2 and 16 have fewer, the first at [0, 0]" in found.summary


def test_copies_that_a_rank_without_a_file_may_hold_are_not_counted(tmp_path: Path) -> None:
    ids = {rank: arange(8, 4)[4 * (rank % 2) :][:4] for rank in range(4)}
    make_dump(tmp_path, parse_mesh("dp=2,tp=2"), {"w": Made(None, ids=ids, shape=(8, 4))})
    (tmp_path / "rank_00003.json").unlink()
    report = check_dump(tmp_path)
    assert kinds(report) == ["incomplete"]
    assert any("ranks without a file may hold the copies" in one.why for one in report.not_checked)


def test_a_number_without_dims_is_its_own_or_is_foreign(tmp_path: Path) -> None:
    own = {rank: np.array(1) for rank in range(2)}
    assert check_made(tmp_path / "right", "tp=2", {"s": Made(None, ids=own, shape=())}).findings == ()
    odd = {"s": Made(None, ids=own | {1: np.array(-1)}, shape=())}
    found = only(check_made(tmp_path / "odd", "tp=2", odd))
    assert (found.kind, found.ranks) == ("foreign", (1,))


def test_overlapping_parts_say_how_long_and_how_far_apart_they_are(tmp_path: Path) -> None:
    ids = {rank: arange(13, 4)[3 * rank : 3 * rank + 4] for rank in range(4)}
    found = only(check_made(tmp_path, "tp=4", {"w": Made(None, ids=ids, shape=(13, 4))}))
    assert found.kind == "duplicated"
    assert found.summary.endswith("parts of 4 along dim 0 begin 3 apart")


def test_padding_where_a_part_belongs_is_missing_that_part(tmp_path: Path) -> None:
    ids = {rank: arange(16, 2)[4 * rank : 4 * rank + 4] for rank in range(4)}
    ids[3] = np.zeros((4, 2), np.int64)
    found = only(check_made(tmp_path, "tp=4", {"w": Made(None, ids=ids, shape=(13, 2))}))
    assert found.kind == "missing"
    assert "2 of 26 elements are on no rank, the first at [12, 0]; 8 zeros stand in for them" in found.summary


def test_a_shard_that_was_never_written_is_foreign(tmp_path: Path) -> None:
    made = Made("[8/tp, 2]", ids={1: np.zeros((2, 2), np.int64)})
    found = only(check_made(tmp_path, "tp=4", {"w": made}))
    assert (found.kind, found.ranks) == ("foreign", (1,))
    assert "4 zeros" in found.summary
    assert not found.generic
    assert "4 of its own 16 elements are lost" in found.summary


@pytest.mark.parametrize(
    ("zero", "ranks", "words"),
    [
        (("w", "bias"), range(4), "this model's names"),
        (("bias",), range(4), "and other weights were"),
        (("w", "bias"), (1, 3), "The load never wrote the shards of ranks 1, 3"),
    ],
)
def test_shards_of_zeros_were_never_written_and_how_far_that_goes_says_why(
    tmp_path: Path, zero: tuple[str, ...], ranks: range | tuple[int, ...], words: str
) -> None:
    blank = dict.fromkeys(ranks, np.zeros((2, 2), np.int64))
    report = check_made(
        tmp_path, "tp=4", {name: Made("[8/tp, 2]", ids=blank if name in zero else {}) for name in ("w", "bias")}
    )
    (found,) = report.findings
    assert found.tensors == zero
    assert words in found.cause
    assert "padding" not in found.cause + found.fix


def test_a_shard_that_was_written_in_part_is_no_padding(tmp_path: Path) -> None:
    part = arange(8, 2)[6:].copy()
    part[1] = 0
    found = only(check_made(tmp_path, "tp=4", {"w": Made("[8/tp, 2]", ids={3: part})}))
    assert "fewer rows than the shard" in found.cause


def test_weights_that_rank_0_alone_has_are_to_be_sent(tmp_path: Path) -> None:
    lost = {rank: np.full((2, 2), -1) for rank in (1, 2, 3)}
    found = only(check_made(tmp_path, "tp=4", {"w": Made("[8/tp, 2]", ids=lost)}))
    assert found.cause.startswith("Only rank 0 loaded the weights")
    assert found.fix.startswith("torch.distributed.broadcast")


def test_values_that_are_no_ids_are_foreign(tmp_path: Path) -> None:
    made = Made("[8/tp, 2]", ids={3: np.full((2, 2), -1)})
    found = only(check_made(tmp_path, "tp=4", {"w": made}))
    assert found.kind == "foreign"
    assert "4 values that are not ids" in found.summary
    assert "never written" in found.cause


def test_padding_in_front_is_named(tmp_path: Path) -> None:
    content = np.concatenate([np.zeros((1, 2), np.int64), arange(8, 2)[:-1]])
    found = only(check_made(tmp_path, "tp=4", {"w": reordered(content, "[8/tp, 2]", "tp=4")}))
    assert found.kind == "foreign"
    assert "moved up by 1" in found.summary


def test_another_tensor_under_this_name_is_named(tmp_path: Path) -> None:
    made = {"a": reordered(arange(4, 2) + 8, "[4/tp, 2]", "tp=2"), "b": "[4/tp, 2]"}
    found = only(check_made(tmp_path, "tp=2", made))
    assert (found.kind, found.tensor, found.held) == ("foreign", "a", "the elements of b")


def test_experts_renumbered_on_each_rank_collide(tmp_path: Path) -> None:
    def expert(index: int) -> np.ndarray:
        return arange(2, 2) + 4 * index

    made: dict[str, Made | str] = {
        "experts.0": Made(None, ids={0: expert(0), 1: expert(2)}, shape=(2, 2)),
        "experts.1": Made(None, ids={0: expert(0), 1: expert(2)}, shape=(2, 2)),
        "experts.2": Made(None, held="[2, 2]", shape=(2, 2)),
        "experts.3": Made(None, held="[2, 2]", shape=(2, 2)),
    }
    report = check_made(tmp_path, "ep=2", made)
    assert [(one.kind, one.tensors) for one in report.findings] == [("name-collision", ("experts.0", "experts.1"))]
    assert "experts.0 on rank 0, experts.2 on rank 1" in report.findings[0].summary


@pytest.mark.parametrize("names", [("layers.1.norm1", "layers.1.norm2"), ("layers.1.norm", "layers.2.norm")])
def test_another_tensor_in_some_copies_of_a_split_one_was_mixed_up_and_not_renumbered(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    ids = {(fsdp, tp): np.arange(4 * fsdp, 4 * fsdp + 4) + 1 + 8 * tp for fsdp in (0, 1) for tp in (0, 1)}
    made = {
        names[0]: Made("[8/fsdp]", ids={2 * fsdp + tp: one for (fsdp, tp), one in ids.items()}),
        names[1]: "[8/fsdp]",
    }
    found = only(check_made(tmp_path, "fsdp=2,tp=2", made))
    assert (found.kind, found.tensor, found.ranks) == ("foreign", names[0], (1, 3))
    assert f"2 of 4 ranks hold {names[1]} under this name: rank 1 starts with element 0 of it" in found.summary
    assert "mixed up" in found.cause


def test_a_tensor_on_some_ranks_only_is_a_pipeline_stage(tmp_path: Path) -> None:
    from shardviz.check.run import check_dump
    from tests.check.records import without

    check_made(tmp_path, "pp=2", {"first": Made(None, held="[2, 2]", shape=(2, 2)), "last": "[4/pp]"})
    without(tmp_path / "made.shardviz", rank=1, name="first")
    assert check_dump(tmp_path / "made.shardviz").findings == ()


def test_zeros_under_a_pending_sum_are_not_foreign(tmp_path: Path) -> None:
    made = Made("[4, 2] +tp", ids={1: np.zeros((4, 2), np.int64)})
    report = check_made(tmp_path, "tp=2", {"w": made})
    assert report.findings == ()
    assert report.not_checked[0].tensor == "w"


def of_reference(folder: Path, mesh: str, made: Made) -> Finding:
    """Return what is found of values that were looked up in a checkpoint."""
    path = make_dump(folder / "made.shardviz", parse_mesh(mesh), {"w": made})
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(record | {"reference": "llama"}))
    return only(check_dump(path))


def test_a_load_that_one_rank_lost_is_that_ranks_and_no_other_checkpoints(tmp_path: Path) -> None:
    found = of_reference(tmp_path, "tp=4", Made("[8/tp, 2]", ids={3: np.full((2, 2), -1)}))
    by_chance = np.full((20, 2), -1)
    by_chance[3, 1] = 5
    other = of_reference(tmp_path / "large", "tp=4", Made("[80/tp, 2]", ids={3: by_chance}))
    assert other.cause == found.cause
    assert "The load skipped rank 3" in found.cause
    assert found.fix.startswith("load this weight on rank 3 as on the others")
    assert "4 of its own 16 elements are lost" in found.summary


def test_weights_of_another_checkpoint_on_every_rank_are_called_so(tmp_path: Path) -> None:
    found = of_reference(tmp_path, "tp=2", Made("[4/tp, 2]", ids=dict.fromkeys(range(2), np.full((2, 2), -1))))
    assert "loaded from a different checkpoint" in found.cause


def test_a_copy_that_was_not_loaded_loses_nothing_that_others_have(tmp_path: Path) -> None:
    found = of_reference(tmp_path, "dp=2", Made("[4, 2]", ids={1: np.full((4, 2), -1)}))
    assert "8 of its own 8 elements are not in every copy" in found.summary
    assert "The load skipped rank 1" in found.cause
