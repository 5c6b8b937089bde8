"""Gradients that the probe's own step clipped by the norm of all of them, which the unsharded step did not.

One factor below 1 for every gradient and every rank, and a norm after it that is a round number: clipping, and rightly
by the whole norm. Clipping by a rank's own norm gives each rank a factor of its own, and stays a finding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import NotChecked
from shardviz.check.step.words import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence

DIGITS = 2
"""The digits of a maximum that somebody chose: 1.0, 0.5, 0.01, 0.25."""

NEAR = 1e-6
"""How near to such a number a norm must be: of a coarser step it says nothing."""

IN_DENOMINATOR = (1e-6, 0.0)
"""What is added to the norm that divides: torch's clip_grad_norm_ adds 1e-6."""


def without_clipping(evidence: Evidence) -> tuple[Sequence[Compared], Sequence[NotChecked]]:
    """Return the gradients that are right but for one clipping of all of them, and the note that says so."""
    gradients = list(evidence.gradients.values())
    factor = _one_factor(gradients)
    if factor is None or len(gradients) < 2 or evidence.without_gradient:
        return (), ()
    maximum = _maximum(evidence, factor)
    if maximum is None or evidence.dump.find("reference", "scalar", "loss") is None or not evidence.loss_is_right:
        return (), ()
    why = (
        f"the size of the gradients: the step clipped them to a norm of {maximum:g} (each is {number(factor)} times "
        "the unsharded model's, which was not clipped); clip in optimizer() to have that compared"
    )
    return gradients, [NotChecked("", why, "step")]


def _one_factor(gradients: Sequence[Compared]) -> float | None:
    """Return the one factor below 1 that makes every rank's part of every gradient right."""
    largest = max(gradients, key=lambda one: float(np.max(np.abs(one.wanted), initial=0.0)), default=None)
    if largest is None or largest.rounding.epsilon > NEAR:
        return None
    factor = _factor(largest)
    if not 0.0 < factor < 1.0:
        return None
    alike = all(one.near(got, one.wanted_of(rank) * factor) for one in gradients for rank, got in one.reduced.items())
    return factor if alike else None


def _factor(one: Compared) -> float:
    dot = sum(float(np.sum(got * one.wanted_of(rank))) for rank, got in one.reduced.items())
    square = sum(float(np.sum(one.wanted_of(rank) ** 2)) for rank in one.reduced)
    return dot / square if square and math.isfinite(dot) else 0.0


def _maximum(evidence: Evidence, factor: float) -> float | None:
    """Return the norm that was clipped to, if it is a round number."""
    owners = {stamp.name: stamp.tied_to or stamp.name for stamp in evidence.dump.files.run.stamps}
    once = {owners.get(one.name, one.name): one.wanted for one in evidence.gradients.values()}
    norm = math.sqrt(sum(float(np.sum(wanted * wanted)) for wanted in once.values()))
    for added in IN_DENOMINATOR:
        maximum = factor * (norm + added)
        rounded = float(f"{maximum:.{DIGITS - 1}e}")
        if abs(maximum - rounded) <= NEAR * 1e-2 * rounded:
            return rounded
    return None
