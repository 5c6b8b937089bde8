"""What is right in a step bounds what is wrong in it: causes that only several results together can prove."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.dump.records.tensors import LayoutRecord
from tests.check.steps import COPIES, ROWS_OVER_TP, WANTED, Step, on_all

if TYPE_CHECKING:
    from pathlib import Path


def step_with_right_outputs(path: Path) -> Step:
    return Step(path).add("output", "output", on_all(WANTED))


def test_a_rank_that_claims_another_shape_than_the_others_is_not_compared(tmp_path: Path) -> None:
    step = Step(tmp_path).add("w", "grad", dict.fromkeys((0, 1, 2), WANTED))
    step.layouts.append(LayoutRecord(0, COPIES, (8, 4)))
    step._put(3, "w", "grad", "step", np.ones((8, 4)), 1, (8, 4))
    findings, unchecked = step.check()
    assert findings == []
    assert "its grad: rank 3 claims a part that lies outside [4, 4]" in unchecked[0].why


@pytest.mark.parametrize(
    ("lost", "cause"),
    [
        ({0: [1], 2: [1]}, "slices-without-gradient"),  # both ranks that have the row
        ({1: [0], 3: [0]}, "slices-without-gradient"),
        ({0: [0], 2: [1]}, "rank-dependent-code"),  # copies that lost different rows
        ({0: [0, 1], 2: [0, 1]}, "unexplained-loss"),  # all that they have
    ],
)
def test_rows_that_no_gradient_comes_back_to_are_named_if_no_rank_has_them(tmp_path, lost, cause):
    values = {rank: WANTED[2 * (rank % 2) :][:2].copy() for rank in range(4)}
    for rank, rows in lost.items():
        values[rank][rows] = 0
    (found,), _ = step_with_right_outputs(tmp_path).add("w", "grad", values, claim=ROWS_OVER_TP).check()
    assert found.cause_id == cause
