"""Dropout masks: equal ones are wrong where an axis splits what they drop, and right on copies and terms of a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardviz.check.step.run import check_masks
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.step import MaskRecord
from shardviz.explain.finding import Finding
from tests.check.checking import check_made
from tests.check.records import change_rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Of = Callable[[int, int], str]


def same(_dp: int, _tp: int) -> str:
    return "same"


def of_tp(_dp: int, tp: int) -> str:
    return f"tp{tp}"


def of_dp(dp: int, _tp: int) -> str:
    return f"dp{dp}"


def of_rank(dp: int, tp: int) -> str:
    return f"dp{dp} tp{tp}"


def said(path: Path, mask: Of, again: Of, given: Of, *, whole: int = 4, size: int = 288) -> str:
    """Return the kind of what is found of one mask on dp=2,tp=2, of an activation `whole` times a rank's."""
    check_made(path, "dp=2,tp=2", {"w": "[4]"})
    folder = path / "made.shardviz"
    for rank in range(4):
        at = divmod(rank, 2)
        record = MaskRecord(mask(*at), again(*at), given(*at), size, size // 2, size * whole)
        change_rank(folder, rank, masks=(record,))
    results = list(check_masks(dump_of(read_files(folder))))
    assert len(results) < 2
    return next((one.held if isinstance(one, Finding) else "not checked" for one in results), "")


@pytest.mark.parametrize(
    ("mask", "again", "given", "whole", "due"),
    [
        (same, same, of_rank, 4, "equal masks along dp and tp"),
        (of_dp, of_dp, of_rank, 4, "equal masks along tp"),
        (same, same, of_tp, 2, "equal masks along tp"),
        (same, of_rank, of_rank, 4, "not checked"),
        (of_rank, of_rank, of_rank, 4, ""),
        (same, same, of_rank, 2, ""),
        (same, same, of_rank, 1, ""),
        (same, same, same, 1, ""),
    ],
    ids=[
        "one seed for all",
        "one seed along tp",
        "copies along dp",
        "seeds of the job",
        "own masks",
        "terms of a sum along one axis",
        "terms of a sum",
        "copies",
    ],
)
def test_equal_masks_are_wrong_on_parts_alone(
    tmp_path: Path, mask: Of, again: Of, given: Of, whole: int, due: str
) -> None:
    assert said(tmp_path, mask, again, given, whole=whole) == due
