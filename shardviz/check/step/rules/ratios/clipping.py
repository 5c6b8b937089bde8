"""One number that all gradients of a step are multiplied by, and whether it is a clipping by the norm of all of them.

Clipping to a round norm, which somebody asked for, is not an error. Clipping by a rank's own
norm gives each rank a number of its own, and stays a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.rules.ratios.norms import total
from shardviz.relate.factors import common_factor
from shardviz.relate.tolerance import EXACT, SAFETY, SINGLE, least_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence

CLIP_EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by."""


@dataclass(frozen=True, slots=True)
class Multiplied:
    """What the gradients of a step have in common.

    Attributes:
        gradients: The gradients, which are the unsharded model's but for the factor.
        factor: The number that every rank's part of every one is multiplied by.
        clipped_to: The round norm that they were clipped to; 0 if that is not what multiplied them.
    """

    gradients: tuple[Compared, ...]
    factor: float
    clipped_to: float


def multiplied(evidence: Evidence) -> Multiplied | None:
    """Return the one number that multiplies all gradients beside a loss that is right; None if there is none."""
    gradients = tuple(one for one in evidence.gradients.values() if np.any(one.wanted) or one.wrong)
    factor = _factor(gradients) if evidence.loss_is_right else None
    return None if factor is None else Multiplied(gradients, factor, _clipped_to(evidence, gradients, factor))


def round_norm(factor: float, norm: float, near: float) -> float:
    """Return the number of two digits that a norm is after it was multiplied; 0 if it is none.

    Args:
        factor: What it was multiplied by, which may have divided by the norm and an epsilon.
        norm: The norm.
        near: How far the number may be off, relative to it.
    """
    for left in (factor * norm, factor * (norm + CLIP_EPSILON)):
        asked = float(f"{left:.1e}")
        if near < SINGLE * 10 and left and abs(left - asked) <= near * asked:
            return asked
    return 0.0


def nearness(gradients: Sequence[Compared]) -> float:
    """Return how far a norm of gradients may be off by rounding, relative to it."""
    return max(EXACT, SAFETY * max(one.rounding.epsilon for one in gradients))


def _factor(gradients: Sequence[Compared]) -> float | None:
    pairs = [(values, one.wanted_of(rank)) for one in gradients for rank, values in one.reduced.items()]
    factor = common_factor(pairs)
    if (
        not factor
        or abs(factor - 1) < least_factor(gradients[0].rounding.epsilon)
        or sum(np.count_nonzero(wanted) for _, wanted in pairs) < 2
    ):
        return None
    alike = (
        one.near(values, factor * one.wanted_of(rank), scale=abs(factor))
        for one in gradients
        for rank, values in one.reduced.items()
    )
    return factor if all(alike) else None


def _clipped_to(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> float:
    """Return the round norm that gradients were clipped to; 0 if they were not."""
    if not 0 < factor < 1:
        return 0.0
    distinct = [one for one in gradients if not any(name < one.name for name in evidence.tied_to(one.name))]
    near = nearness(gradients)
    norms = [total(one.wanted for one in some) for some in (gradients, distinct)]
    return next((found for norm in norms if (found := round_norm(factor, norm, near))), 0.0)
