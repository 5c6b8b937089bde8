"""What weights are of a reference's, if all of them differ: rounded, in another order, or another weight's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.orders import name_change
from shardviz.explain.checkpoints.conversion import NarrowedOnTheWay
from shardviz.explain.testing.assertions import OtherOrderThanReference
from shardviz.explain.testing.transfers import SwappedTensors
from shardviz.layout.notation import write
from shardviz.reference.lookup import bits_of
from shardviz.relate.casts import rounding_between
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]

NARROW = ("bfloat16", "float16")
WIDE = "float64"
"""The dtype of all values here, and of the bits that are compared."""


def related_weight(comparison: Compared, references: Mapping[str, Values]) -> Finding | None:
    """Return the finding for a weight whose values are the reference's, related to them in a way that has a name.

    Args:
        comparison: The weight, compared with its own reference.
        references: The reference's tensors of the same role, by name.
    """
    whole = _whole(comparison)
    if whole is None or not whole.size or np.ptp(whole) == 0:
        return None
    for cause, sentence in _relations(comparison, whole, references):
        claimed = write(comparison.claimed) if comparison.claimed else ""
        return cause.finding(comparison.name, tuple(comparison.reduced), sentence, claimed=claimed)
    return None


def _relations(comparison: Compared, whole: Values, references: Mapping[str, Values]) -> Iterator[tuple[Cause, str]]:
    """Yield what a whole tensor is of the reference's, with its cause, the surest first."""
    expected = comparison.wanted
    for name, values in references.items():
        if name != comparison.name and np.array_equal(values, whole):
            yield SwappedTensors(), f"it holds what the reference has as {printable(name)}"
    before, after = bits_of(expected + 0.0), bits_of(whole + 0.0)  # minus zero is zero
    for there, here, words in (
        (before, after, "it has the reference's values, rounded to"),
        (after, before, "the reference has its values, rounded to"),
    ):
        if rounding := rounding_between(there, WIDE, here, WIDE, NARROW):
            yield NarrowedOnTheWay(rounding.dtype, "the wider dtype"), f"{words} {rounding.dtype}"
    if order := name_change(before, after):
        yield OtherOrderThanReference(), f"the values are the reference's in another order: {order}"


def _whole(comparison: Compared) -> Values | None:
    """Return a tensor put together from all ranks; None if copies differ or a part of it is missing."""
    whole = np.full(comparison.wanted.size, np.nan)
    for rank, held in comparison.reduced.items():
        ids = comparison.regions[rank].flat_ids(comparison.wanted.shape).ravel()
        known = ~np.isnan(whole[ids])
        if not np.array_equal(whole[ids][known], held.ravel()[known]):
            return None
        whole[ids] = held.ravel()
    return None if np.isnan(whole).any() else whole.reshape(comparison.wanted.shape)
