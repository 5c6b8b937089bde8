"""Ranks that hold other ranks' shards: the rule by which they do, the few that do, and what is said of absent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.run import check_dump
from shardviz.dump.write import rank_file
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from tests.check.checking import arange, check_made, only, shards_of
from tests.dumps import Made

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardviz.check.report import Report


def by_source(tmp_path: Path, claimed: str, mesh: str, source: list[int], absent: Collection[int] = ()) -> Report:
    """Check a tensor of which each rank has another's shard; `absent` ranks leave no file."""
    rows = parse(claimed).layout(parse_mesh(mesh)).shape[0]
    own = shards_of(arange(rows, 4), claimed, mesh)
    made = Made(claimed, ids={rank: own[source[rank]] for rank in own})
    check_made(tmp_path, mesh, {"w": made})
    for rank in absent:
        (tmp_path / "made.shardviz" / rank_file(rank)).unlink()
    return check_dump(tmp_path / "made.shardviz")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([0, 0, 2, 2], "tp=i holds the shard of tp=2*(i//2)"),
        ([0, 0, 1, 1], "tp=i holds the shard of tp=i//2"),
        ([0, 1, 0, 1], "tp=i holds the shard of tp=i%2"),
        ([0, 1, 1, 2], "the shards [0, 1, 1, 2], some of them more than once"),
        ([0, 1, 2, 3, 4, 5, 0, 1], "tp=i holds the shard of tp=i%6: the first 6 come again"),
        ([0, 1, 2, 3, 0, 1, 2], "tp=i holds the shard of tp=i%4: the first 4 come again"),
        ([0, 0, 2, 2, 4], "tp=i holds the shard of tp=2*(i//2): 2 neighbors have the first shard of theirs"),
    ],
)
def test_ranks_that_share_a_shard_are_no_other_order_of_ranks(tmp_path: Path, source: list[int], words: str) -> None:
    findings = by_source(tmp_path, f"[{2 * len(source)}/tp, 4]", f"tp={len(source)}", source).findings
    assert [found.kind for found in findings] == ["duplicated", "missing"]
    for found in findings:
        assert words in found.summary
        assert "each rank" not in found.summary
        assert "Several ranks read the same part" in found.cause
        assert "mesh.get_local_rank('tp'), undivided" in found.fix


@pytest.mark.parametrize(
    ("mesh", "rule", "source"),
    [
        ("dp=2,tp=4", "i%6", [0, 1, 2, 3, 4, 5, 0, 1]),
        ("dp=4,tp=3", "i%10", [*range(10), 0, 1]),
        ("dp=2,tp=4", "i//2", [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_a_rank_that_was_wrapped_or_divided_is_a_rule_on_any_mesh(
    tmp_path: Path, mesh: str, rule: str, source: list[int]
) -> None:
    size = len(source)
    for found in by_source(tmp_path, f"[{2 * size}/dp/tp, 4]", mesh, source).findings:
        assert f"rank i holds the shard of rank {rule}" in found.summary
        assert "Several ranks read the same part" in found.cause
        assert "mesh.get_coordinate(), undivided" in found.fix


@pytest.mark.parametrize(
    ("source", "words", "cause"),
    [
        ([0, 1, 1, 3], "tp=2 holds the shard of tp=1; all other positions hold their own", "clamped"),
        ([0, 1, 2, 3, 4, 5, 6, 6], "tp=7 holds the shard of tp=6; all other positions hold their own", "clamped"),
        ([0, 1, 2, 3, 4, 5, 6, 0], "tp=7 holds the shard of tp=0; all other positions hold their own", "clamped"),
        ([0, 5, 2, 3, 4, 1, 6, 7], "tp=1 holds the shard of tp=5 and tp=5 holds the shard of tp=1", "changed places"),
    ],
)
def test_few_ranks_with_anothers_shard_are_named_and_the_others_are_not_blamed(
    tmp_path: Path, source: list[int], words: str, cause: str
) -> None:
    for found in by_source(tmp_path, "[16/tp, 4]", f"tp={len(source)}", source).findings:
        assert words in found.summary
        assert cause in found.cause
        assert "each rank" not in found.summary


@pytest.mark.parametrize(
    ("mesh", "source", "absent", "words", "cause"),
    [
        ("tp=8", [1, 0, 2, 3, 4, 5, 6, 7], (5, 6), "; all other positions that were read hold", "have each other's"),
        ("tp=8", [1, 1, 2, 3, 4, 5, 6, 7], (5,), "; all other positions that were read hold", "clamped"),
        ("tp=8", [0, 6, 2, 3, 4, 5, 1, 7], (6,), "; all other positions that were read hold", "that were not read"),
        ("dp=2,tp=4", [0, 6, 2, 3, 4, 5, 1, 7], (7,), "; all other ranks that were read hold", "have each other's"),
        ("tp=8", [3] * 8, (5,), "every rank along tp that was read holds the shard of tp=3", "ignores the rank's"),
        ("tp=8", [0, 1, 2, 3, 4, 5, 0, 1], (0, 1), "[?, ?, 2, 3, 4, 5, 0, 1]: tp=i holds", "Several ranks"),
    ],
)
def test_of_ranks_without_a_file_nobody_says_that_they_are_right(
    tmp_path: Path, mesh: str, source: list[int], absent: tuple[int, ...], words: str, cause: str
) -> None:
    claimed = "[16/dp/tp, 4]" if "dp" in mesh else "[16/tp, 4]"
    found = by_source(tmp_path, claimed, mesh, source, absent).findings[0]
    assert words in found.summary
    assert cause in found.cause
    assert "all others their own" not in found.cause


@pytest.mark.parametrize("claimed", ["[16/dp/tp, 4]", "[16/tp, 4]", "[16/dp, 4]"])
def test_a_wrapped_rank_is_one_rule_whichever_axes_split_the_tensor(tmp_path: Path, claimed: str) -> None:
    found = by_source(tmp_path, claimed, "dp=2,tp=4", [0, 1, 2, 3, 4, 5, 0, 1]).findings[0]
    assert "rank i holds the shard of rank i%6" in found.summary
    assert "Several ranks read the same part" in found.cause


@pytest.mark.parametrize(("mesh", "absent"), [("tp=2", (1,)), ("tp=4", (1, 2, 3)), ("dp=2,tp=2", (1, 2, 3))])
def test_one_rank_alone_shows_no_rule(tmp_path: Path, mesh: str, absent: tuple[int, ...]) -> None:
    size = parse_mesh(mesh).size
    claimed = "[16/dp/tp, 4]" if "dp" in mesh else "[16/tp, 4]"
    found = by_source(tmp_path, claimed, mesh, [size - 1 - rank for rank in range(size)], absent).findings[0]
    assert "i holds" not in found.summary
    assert "hold their own" not in found.summary
    assert "ranks that were not read" in found.cause


def test_an_order_that_is_not_seen_without_the_absent_ranks_is_not_called_unruly(tmp_path: Path) -> None:
    found = by_source(tmp_path, "[16/dp/tp, 4]", "dp=2,tp=4", [3, 6, 1, 7, 0, 2, 5, 4], (3,)).findings[0]
    assert "files of all ranks" in found.cause
    assert "check again with the files of all ranks" in found.fix


def test_an_unruly_order_of_ranks_that_were_all_read_is_called_so(tmp_path: Path) -> None:
    own = shards_of(arange(16, 4), "[16/tp, 4]", "tp=4")
    mixed = arange(16, 4).ravel()[np.random.default_rng(0).permutation(64)].reshape(4, 4, 4)
    made = Made("[16/tp, 4]", ids={rank: mixed[rank] for rank in own})
    assert "no simple rule" in only(check_made(tmp_path, "tp=4", {"w": made})).cause


@pytest.mark.parametrize(
    ("source", "words", "cause"),
    [
        ([0, 1, 1, 3], "of dim 0 cut over tp, tp=2 holds the shard of tp=1; all other", "several names"),
        ([0, 1, 2, 3, 4, 4, 4, 7], "tp=5 holds the shard of tp=4 and tp=6 holds the shard of tp=4", "several names"),
        ([0, 1, 2, 3, 4, 5, 0, 1], "tp=i holds the shard of tp=i%6", "Several ranks read the same part"),
        ([0, 0, 2, 2, 4, 4, 6, 6], "tp=i holds the shard of tp=2*(i//2)", "Several ranks read the same part"),
    ],
)
def test_plain_parts_that_are_held_for_others_are_no_remainder(
    tmp_path: Path, source: list[int], words: str, cause: str
) -> None:
    mesh = f"tp={len(source)}"
    own = shards_of(arange(16, 2), "[16/tp, 2]", mesh)
    made = Made(None, ids={rank: own[at] for rank, at in enumerate(source)}, shape=(16, 2))
    for found in check_made(tmp_path, mesh, {"w": made}).findings:
        assert words in found.summary
        assert cause in found.cause


def test_ranks_that_share_shards_by_no_rule_are_listed(tmp_path: Path) -> None:
    source = [0 if rank in (3, 7, 8, 13) else rank for rank in range(16)]
    for found in by_source(tmp_path, "[32/dp/tp, 4]", "dp=4,tp=4", source).findings:
        assert "4 ranks hold others' shards: rank 3 holds the shard of rank 0 and rank 7 holds" in found.summary
        assert "Several ranks read the same part" in found.cause


def test_copies_that_share_shards_are_still_those_of_one_position(tmp_path: Path) -> None:
    source = [*range(8), *(0 if rank in (11, 12, 13, 15) else rank - 8 for rank in range(8, 16))]
    found = by_source(tmp_path, "[16/tp, 4]", "dp=2,tp=8", source).findings[0]
    assert "the copies on dp=0 are in order, but on dp=1" in found.summary


def test_plain_parts_that_overlap_and_leave_rows_out_are_no_remainder(tmp_path: Path) -> None:
    ids = {rank: arange(16, 2)[3 * rank : 3 * rank + 4] for rank in range(4)}
    for found in check_made(tmp_path, "tp=4", {"w": Made(None, ids=ids, shape=(16, 2))}).findings:
        assert "parts of 4 along dim 0 begin 3 apart" in found.summary
        assert "overlapping" in found.cause


def test_plain_parts_whose_last_rows_are_lost_are_a_remainder(tmp_path: Path) -> None:
    ids = {rank: arange(17, 2)[4 * rank : 4 * rank + 4] for rank in range(4)}
    found = only(check_made(tmp_path, "tp=4", {"w": Made(None, ids=ids, shape=(17, 2))}))
    assert "remainder" in found.cause


def test_few_positions_along_one_axis_and_all_along_another_do_not_contradict(tmp_path: Path) -> None:
    own = shards_of(arange(32, 4), "[32/dp/fsdp, 4]", "dp=2,fsdp=8")
    swapped = {0: 0, 1: 2, 2: 1, **{at: at for at in range(3, 8)}}
    ids = {rank: own[(1 - rank // 8) * 8 + swapped[rank % 8]] for rank in range(16)}
    found = only(check_made(tmp_path, "dp=2,fsdp=8", {"w": Made("[32/dp/fsdp, 4]", ids=ids)}))
    assert "each rank holds another rank's shard" in found.summary
    assert "hold their own" not in found.summary


def test_two_ranks_of_a_mesh_with_each_others_shards_are_named_by_rank(tmp_path: Path) -> None:
    own = shards_of(arange(16, 4), "[16/tp/fsdp, 4]", "fsdp=4,tp=2")
    own[1], own[6] = own[6], own[1]
    found = only(check_made(tmp_path, "fsdp=4,tp=2", {"w": Made("[16/tp/fsdp, 4]", ids=own)}))
    assert found.ranks == (1, 6)
    assert "rank 1 holds the shard of rank 6 and rank 6 holds the shard of rank 1; all other ranks" in found.summary
