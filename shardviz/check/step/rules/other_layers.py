"""`wrong-value` of gradients that were reduced over an axis whose ranks have other weights, as stages of a pipeline.

Ranks along such an axis have tensors of the same shapes under other names. A reduction over it runs without a word and
leaves one gradient for different weights: equal numbers under different names tell it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.words import claimed_text
from shardviz.explain.sums import MixedLayers

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding


def check_other_layers(evidence: Evidence, one: Compared) -> Finding | None:
    """Return the finding if every wrong rank's gradient is that of another weight, which another rank has."""
    tied = (one.name, *evidence.tied_to(one.name))
    others = [other for name, other in evidence.gradients.items() if name not in tied and other.wrong]
    for axis in one.mesh.axes:
        for other in others:
            if other.mesh == one.mesh and _is_shared(one, other, axis):
                return _finding(one, other, axis)
    return None


def _is_shared(one: Compared, other: Compared, axis: str) -> bool:
    """Whether along an axis ranks have one of two tensors each, and one gradient for both."""
    for group in one.mesh.groups(axis):
        for rank in set(group) & set(one.wrong):
            equal = any(
                at != rank and at not in one.reduced and rank not in other.reduced and _equal(one, other, rank, at)
                for at in group
                if at in other.reduced
            )
            if not equal:
                return False
    return bool(one.wrong)


def _equal(one: Compared, other: Compared, rank: int, at: int) -> bool:
    own, values = one.reduced[rank], other.reduced[at]
    return own.shape == values.shape and bool(np.any(own)) and one.near(own, values)


def _finding(one: Compared, other: Compared, axis: str) -> Finding:
    others = tuple(other for other in one.mesh.axes if other != axis and one.mesh.axis_size(other) > 1)
    return MixedLayers(axis, others).finding(
        one.name,
        one.wrong,
        f"the gradient is equal to that of {other.name}, another weight, which other ranks along {axis} have",
        claimed=claimed_text(one),
    )
