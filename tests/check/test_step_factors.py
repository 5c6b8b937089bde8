"""What is common to all gradients of a step, and what a factor, a norm or a loss comes of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.check.steps import WANTED, Step

if TYPE_CHECKING:
    from pathlib import Path


def halves_over_dp(values: np.ndarray) -> dict[int, np.ndarray]:
    return {rank: np.split(values, 2)[rank // 2] for rank in range(4)}


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
