"""What a step's numbers come of: the finding that is the cause is told, and what follows from it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.check.steps import WANTED, Step, by_tp

if TYPE_CHECKING:
    from pathlib import Path


def test_an_output_that_is_labeled_as_a_pending_sum_is_right(tmp_path: Path) -> None:
    part = np.full(WANTED.shape, 0.5)
    step = Step(tmp_path).add("output", "output", by_tp(part, WANTED - part), claim=("Replicate()", "Partial()"))
    assert step.check() == ([], [])
