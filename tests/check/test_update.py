"""States that an optimizer keeps of a rank's part: what it scales them by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.step.update.compare import check_unsharded_update
from shardviz.explain.finding import Finding
from tests.check.steps import ROWS_OVER_TP, WANTED, Step, on_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

SCALES = {
    "the gradient's norm": lambda weight, gradient: 1 / np.linalg.norm(gradient),
    "the weight's norm": lambda weight, gradient: np.linalg.norm(weight),
    "the ratio of the weight's and the gradient's norm": lambda weight, gradient: (
        np.linalg.norm(weight) / np.linalg.norm(gradient)
    ),
    "the ratio of the weight's and the update's norm": lambda weight, gradient: (
        np.linalg.norm(weight) / np.linalg.norm(gradient + 0.1 * weight)
    ),
    "the gradient's root mean square": lambda weight, gradient: 1 / np.sqrt(np.mean(gradient**2)),
}


def scaled_on_ranks(
    path: Path, scale: Callable[[NDArray[np.float64], NDArray[np.float64]], float], decay: float, kind: str
) -> list[Finding]:
    """Keep a state of rows of a gradient, which each rank multiplies by a number of its own rows."""
    shape, power = (8, 4), 2 if kind == "exp_avg_sq" else 1
    gradient, weight = (np.random.default_rng(seed).normal(size=shape) for seed in (5, 6))
    step = Step(path).add("loss", "scalar", on_all(1.0), wanted=1.0)
    step.add("w", "grad", {rank: np.split(gradient, 2)[rank % 2] for rank in range(4)}, gradient, ROWS_OVER_TP)
    step.add("v", "grad", on_all(WANTED), WANTED)
    whole = (scale(weight, gradient) * (gradient + decay * weight)) ** power
    step.put(0, "w", "param", "reference", weight).put(0, f"w.{kind}", "optim", "updated", whole)
    rows = [np.split(array, 2) for array in (weight, gradient)]
    held = {}
    for rank in range(4):
        own_weight, own_gradient = rows[0][rank % 2], rows[1][rank % 2]
        held[rank] = (scale(own_weight, own_gradient) * (own_gradient + decay * own_weight)) ** power
    step.hold_rows(f"w.{kind}", "optim", held, shape)
    outcomes = list(check_unsharded_update(step.dump(), frozenset(), {}))
    return [outcome for outcome in outcomes if isinstance(outcome, Finding)]


@pytest.mark.parametrize(
    ("norm", "kind"),
    [(norm, kind) for norm in SCALES for kind in ("momentum_buffer", "exp_avg_sq")[: 1 if "update" in norm else 2]],
)
def test_an_optimizer_that_keeps_what_it_scales_by_a_norm_of_the_ranks_part_is_named(
    tmp_path: Path, norm: str, kind: str
) -> None:
    (finding,) = scaled_on_ranks(tmp_path, SCALES[norm], 0.1 if "update" in norm else 0.0, kind)
    assert finding.cause_id == "step-of-part"
    assert norm in finding.cause
    assert "different order" not in finding.cause


def test_a_state_that_ranks_multiply_by_numbers_without_a_norm_is_not_taken_for_another_weights(tmp_path: Path) -> None:
    (finding,) = scaled_on_ranks(tmp_path, lambda weight, _: float(np.abs(weight).max()), 0.0, "momentum_buffer")
    assert finding.cause_id == "rank-dependent-step"
    assert "different order" not in finding.cause
    assert "learning rate" not in finding.cause
