"""Gradients of one weight under two names, and of different weights under one reduction.

`unreduced-gradient` of a tied weight whose names went to different ranks: each has the gradient of its own use. On
stages of a pipeline an embedding and a head cannot share storage. They are copies, which stay equal only if the sum
of both gradients is taken on both (Megatron-LM's embedding group).

`wrong-value` of gradients that were reduced over an axis whose ranks have other weights, as stages of a pipeline. Ranks
along such an axis have tensors of the same shapes under other names. A reduction over it runs without a word and leaves
one gradient for different weights: equal numbers under different names tell it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from shardviz.explain.step.gradients import TiedShardsMisaligned, UnsummedTiedGradients
from shardviz.explain.step.sums import MixedLayers
from shardviz.relate.measures import is_of_other_parts, is_right_with, is_shared_with, ratio_of

if TYPE_CHECKING:
    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding


def check_other_layers(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if every wrong rank's gradient is that of another weight, which another rank has."""
    tied = (comparison.name, *evidence.tied_to(comparison.name))
    for axis in comparison.mesh.axes:
        for neighbor in evidence.wrong_gradients.near(comparison, axis):
            is_other = neighbor.name not in tied and neighbor.mesh == comparison.mesh
            if is_other and is_shared_with(comparison, neighbor, axis):
                names = (name for name in comparison.mesh.axes if name != axis)
                others = tuple(name for name in names if comparison.mesh.axis_size(name) > 1)
                which = f"that of {neighbor.name}, a different weight, on other ranks along {axis}"
                return comparison.finding(MixedLayers(axis, others), f"the gradient is equal to {which}")
    return None


def check_tied(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if the gradients of names that were one tensor were not summed, or not rightly."""
    names = evidence.tied_to(comparison.name)
    others = [evidence.gradients[name] for name in names if name in evidence.gradients]
    if not others:
        return None
    if not is_right_with(comparison, others):
        tied = next((other for other in others if is_of_other_parts(comparison, other)), None)
        if tied is None:
            return None
        return comparison.finding(
            TiedShardsMisaligned(),
            f"the gradient is equal to that of {tied.name} on other ranks, with which it was one tensor: but the local "
            "shards are different parts of it",
        )
    listed = " and ".join(other.name for other in others)
    if ratio_of(comparison) == Fraction(1, 1 + len(others)):
        uses = 1 + len(others)
        return comparison.finding(
            UnsummedTiedGradients(uses),
            f"the gradient is 1/{uses} of the unsharded model's: the gradients of its {uses} uses were averaged",
            kind="wrong-scale",
            details=(f"it is tied to {listed} on other ranks",),
        )
    return comparison.finding(
        UnsummedTiedGradients(),
        f"the gradient counts this name's use only: it is tied to {listed} on other ranks, and the sum of their "
        "gradients is the unsharded model's",
    )
