"""What is common to all gradients of a step, and what a factor, a norm or a loss comes of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.picture.text.report import step_text
from tests.check.steps import COPIES, WANTED, Step, on_all

if TYPE_CHECKING:
    from pathlib import Path


OVER_DP = ("Partial('avg')", "Replicate()")
ROWS_OVER_DP = ("Shard(0)", "Replicate()")


def halves_over_dp(values: np.ndarray) -> dict[int, np.ndarray]:
    return {rank: np.split(values, 2)[rank // 2] for rank in range(4)}


def test_a_factor_of_all_gradients_may_come_of_the_loss(tmp_path: Path) -> None:
    step = Step(tmp_path).add("loss", "scalar", on_all(4.0), 4.1, OVER_DP)  # wrong, so each gradient has its own
    for name in ("v", "w"):
        step.add(name, "grad", halves_over_dp(WANTED * 2), claim=ROWS_OVER_DP)
    step.add("frozen", "grad", on_all(WANTED * 0), WANTED * 0)  # zeros have any factor
    fixes = {one.fix for one in step.check()[0] if one.tensor in ("v", "w")}
    assert len(fixes) == 1
    assert "or divide the loss by 2" in fixes.pop()


@pytest.mark.parametrize(
    ("num_ranks", "divides_by", "cause"),
    [
        (4, None, "fsdp-sums-gradients"),
        (4, 1.0, "fsdp-sums-gradients"),
        (4, 4.0, "multiplied-term"),
        (1, 1.0, "undivided-shard-gradient"),
    ],
)
def test_what_fsdp_was_seen_to_divide_by_tells_whether_it_sums(
    tmp_path: Path, num_ranks: int, divides_by: float | None, cause: str
) -> None:
    step = Step(tmp_path).add("loss", "scalar", {0: 1.0, 1: 3.0, 2: 5.0, 3: 7.0}, 4.0, ("Partial('avg')",) * 2)
    for name, factor in (("v", 1), ("w", 4)):
        parts = {rank: np.split(half, 2, 1)[rank % 2] for rank, half in halves_over_dp(WANTED * factor).items()}
        step.add(name, "grad", parts, claim=("Shard(0)", "Shard(1)"))
    for rank in range(4):
        step.reduce(rank, tuple(range(4)) if num_ranks > 1 else (rank,), ("v", "w"), divides_by)
    (finding,) = step.check()[0]
    assert (finding.tensor, finding.cause_id) == ("w", cause)


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ({0: 4.0, 1: 4.0, 2: 5.0, 3: 4.0}, "loss of rank 2 5, unsharded 4"),
        (on_all(5.0), "loss 5, unsharded 4"),
        (on_all(4.0), "loss 4, unsharded 4"),
    ],
    ids=["one rank's", "every rank's", "right"],
)
def test_the_line_of_a_step_has_the_loss_that_is_wrong(tmp_path: Path, losses: dict[int, float], text: str) -> None:
    assert step_text(Step(tmp_path).add("loss", "scalar", losses, 4.0, COPIES).dump()) == text
