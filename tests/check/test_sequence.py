"""Tensors that share a sequence: another order on a rank is found, the same order is not, whatever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.run import check_dump
from tests.check.checking import arange, check_made, only
from tests.check.records import change_run
from tests.dumps import Made

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.check.report import Report

Parts = dict[int, "NDArray[np.int64]"]
LENGTH = 16


def head_and_tail(whole: NDArray[np.int64], ranks: int = 4) -> Parts:
    chunks = np.split(whole, 2 * ranks)
    return {rank: np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)}


def plain(whole: NDArray[np.int64], ranks: int = 4) -> Parts:
    return dict(enumerate(np.split(whole, ranks)))


def along(path: Path, sequence: dict[str, int] | None = None, mesh: str = "cp=4", **tensors: Made | Parts) -> Report:
    """Check plain tensors that share a sequence of 16 positions."""
    made = {name: one if isinstance(one, Made) else _made(one) for name, one in tensors.items()}
    check_made(path, mesh, made)
    change_run(path / "made.shardviz", sequence=dict.fromkeys(tensors, 0) if sequence is None else sequence)
    return check_dump(path / "made.shardviz")


def _made(parts: Parts) -> Made:
    return Made(None, ids=parts, shape=(LENGTH, *parts[0].shape[1:]))


def test_positions_cut_in_plain_order_beside_tokens_in_head_tail_order_are_found(tmp_path: Path) -> None:
    whole = arange(LENGTH)
    found = only(along(tmp_path, tokens=head_and_tail(whole), labels=head_and_tail(whole), positions=plain(whole)))
    assert (found.kind, found.tensor, found.ranks) == ("sequence-order", "positions", (0, 1, 2, 3))
    assert found.summary.endswith("rank 0 has [0:4], tokens has [0:2+14:16]")
    assert found.held == "[16/cp]"
    assert found.intended == "as tokens: cp=i of 4 holds chunks i and 7-i of 8 along dim 0"
    assert "context_parallel" in found.fix


@pytest.mark.parametrize("split", [head_and_tail, plain])
def test_one_order_for_all_is_right_whichever_it_is(tmp_path: Path, split: type[dict[int, int]]) -> None:
    report = along(tmp_path, tokens=split(arange(LENGTH)), table=split(arange(LENGTH, 3)))
    assert (report.findings, report.not_checked) == ((), ())


def test_a_table_that_is_whole_on_every_rank_is_looked_up_by_position(tmp_path: Path) -> None:
    table = dict.fromkeys(range(4), arange(LENGTH, 3))
    report = along(tmp_path, tokens=head_and_tail(arange(LENGTH)), labels=head_and_tail(arange(LENGTH)), table=table)
    assert (report.findings, report.not_checked) == ((), ())


def test_what_does_not_share_the_sequence_may_be_split_in_another_order(tmp_path: Path) -> None:
    tensors = {"tokens": head_and_tail(arange(LENGTH)), "weight": plain(arange(LENGTH))}
    assert along(tmp_path, {"tokens": 0}, **tensors).findings == ()


def test_a_table_split_on_another_dim_is_found_by_the_dim_that_is_the_sequence(tmp_path: Path) -> None:
    parts = {rank: part.T for rank, part in plain(arange(3, LENGTH).T).items()}
    table = Made(None, ids=parts, shape=(3, LENGTH))
    report = along(tmp_path, {"tokens": 0, "ta*": 1}, tokens=head_and_tail(arange(LENGTH)), table=table)
    assert [(found.kind, found.tensor) for found in report.findings] == [("sequence-order", "table")]


def test_positions_that_start_anew_on_every_rank_are_one_finding_with_its_own_cause(tmp_path: Path) -> None:
    whole = arange(LENGTH)
    anew = dict.fromkeys(range(4), whole[:4])
    found = only(along(tmp_path, tokens=plain(whole), labels=plain(whole), positions=anew))
    assert (found.kind, found.ranks, found.held) == ("sequence-order", (1, 2, 3), "every rank [0:4]")
    assert "from 0" in found.cause


def test_tokens_that_are_on_no_rank_are_missing_though_all_are_ordered_alike(tmp_path: Path) -> None:
    parts = {rank: part[:-1] for rank, part in plain(arange(LENGTH)).items()}
    found = only(along(tmp_path, tokens=parts, labels=parts))
    assert (found.kind, found.tensors) == ("missing", ("tokens", "labels"))


def test_a_finer_split_of_the_sequence_is_reported_as_unchecked(tmp_path: Path) -> None:
    coarse = {0: arange(LENGTH)[:8], 1: arange(LENGTH)[:8], 2: arange(LENGTH)[8:], 3: arange(LENGTH)[8:]}
    report = along(tmp_path, mesh="cp=2,tp=2", tokens=coarse, labels=coarse, norm=plain(arange(LENGTH)))
    assert report.findings == ()
    assert [(one.tensor, one.why) for one in report.not_checked] == [
        ("norm", "rank 0 has 4 positions of it and 8 of tokens")
    ]


def test_a_name_that_no_tensor_has_and_a_dim_that_it_lacks_are_reported(tmp_path: Path) -> None:
    report = along(tmp_path, {"tokens": 0, "x": 2, "gone": 0}, tokens=plain(arange(LENGTH)), x=plain(arange(LENGTH)))
    assert {one.tensor: one.why for one in report.not_checked} == {
        "x": "its order along the sequence: it has no dim 2",
        "gone": "no tensor that shares a sequence has this name",
    }


def test_a_sequence_that_ranks_missing_from_the_dump_share_is_compared_on_the_others(tmp_path: Path) -> None:
    whole = arange(LENGTH)
    along(tmp_path, tokens=head_and_tail(whole), positions=plain(whole))
    (tmp_path / "made.shardviz" / "rank_00002.json").unlink()
    found = next(one for one in check_dump(tmp_path / "made.shardviz").findings if one.kind == "sequence-order")
    assert found.ranks == (0, 1, 3)
