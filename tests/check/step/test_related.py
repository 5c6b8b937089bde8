"""Results that one relation makes of the unsharded model's, and those that look like it and are not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.check.steps import MESH, ROWS_OVER_TP, WANTED, Step, by_tp, on_all

if TYPE_CHECKING:
    from pathlib import Path

ZEROS = np.zeros_like(WANTED)


def causes(path: Path, role: str, values: object, **rest: object) -> list[str]:
    findings, _ = Step(path).add("output" if role == "output" else "w", role, values, **rest).check()  # type: ignore[arg-type]
    return [finding.cause_id for finding in findings]


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (WANTED + 0.37, "added-number"),
        (WANTED - 12.0, "added-number"),
        (WANTED + math.log(2), "miscounted-exponentials"),
        (WANTED - math.log(4), "miscounted-exponentials"),
        (ZEROS, "only-zeros-there"),
        (WANTED.T, "transposed-result"),
    ],
)
def test_one_relation_on_all_ranks_names_the_cause(tmp_path: Path, values: object, cause: str) -> None:
    assert causes(tmp_path, "output", on_all(values)) == [cause]


def test_a_number_that_some_ranks_add_is_said_with_these_ranks(tmp_path: Path) -> None:
    first, second = np.split(WANTED, 2)
    (finding,), _ = Step(tmp_path).add("output", "output", by_tp(first, second + 0.37), claim=ROWS_OVER_TP).check()
    assert (finding.cause_id, finding.ranks) == ("added-number", (1, 3))
    assert "0.37" in finding.summary
    assert "ranks 1, 3" in finding.cause


def test_numbers_that_differ_by_rank_are_not_one_that_is_added(tmp_path: Path) -> None:
    assert causes(tmp_path, "output", {rank: WANTED + 0.1 + rank for rank in MESH.ranks}) != ["added-number"]


def test_a_number_that_is_added_to_a_row_alone_is_not_added_to_every_element(tmp_path: Path) -> None:
    values = WANTED.copy()
    values[1] += 0.37
    assert causes(tmp_path, "output", on_all(values)) == ["unexplained-forward"]


def test_a_cast_is_told_from_a_factor_that_is_nearly_one(tmp_path: Path) -> None:
    wanted = np.random.default_rng(3).normal(size=(4, 4))
    rounded = (wanted.astype(np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32)
    assert causes(tmp_path / "a", "output", on_all(rounded), wanted=wanted) == ["rounded-result"]
    assert "rounded-result" not in causes(tmp_path / "b", "output", on_all(wanted * 1.0015), wanted=wanted)


def test_four_numbers_are_too_few_to_name_a_relation(tmp_path: Path) -> None:
    wanted = np.array([0.5, 2.0, -1.0, 3.0])
    assert causes(tmp_path, "output", on_all(wanted + 0.37), wanted=wanted) == ["unexplained-forward"]
