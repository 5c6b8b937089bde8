"""What a loss over classes that ranks split sends back wrongly: the gradient of their logits, which are right.

A cross entropy sends each row back its softmax times a number, and that number less at the row's label. Each rank has
some classes of every row, so that the gradient tells what a maximum or a sum of these alone makes of the softmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.trace.causes import compared_at
from shardviz.check.step.trace.divergence import Divergence, is_wrong_from_loss
from shardviz.explain.step.parts import LabelOutsidePart, SoftmaxOfPart, TermOfPartOfClasses
from shardviz.layout.splits import axes_in
from shardviz.relate.tolerance import CANCELED, FEW, LEAST_STATISTIC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.cause import Cause

    Values = NDArray[np.float64]
    Indices = NDArray[np.int64]


def cause_in_classes(evidence: Evidence) -> Cause | None:
    """Return what is wrong about the gradient of logits whose classes ranks split; None if it is something else."""
    for call in evidence.calls.in_order:
        point = call.point("gradient of output", "odd")
        if point is None or not is_wrong_from_loss(evidence.calls, call):
            continue
        for comparison in compared_at(evidence, Divergence("backward", "outside", call, point)):
            cause = cause_of_gradient(comparison)
            if cause is not None:
                return cause
    return None


def cause_of_gradient(comparison: Compared) -> Cause | None:
    """Return what is wrong about the gradient of logits in some layout; None if that layout shows nothing."""
    values = comparison.values.values()
    if comparison.claimed is None or not all(held.ndim and held.size and np.isfinite(held).all() for held in values):
        return None
    axes = axes_in(comparison.claimed.chains[-1])
    if not axes:
        return None
    near, named = comparison.tolerance, " and ".join(axes)
    offs = [held - comparison.wanted_of(rank) for rank, held in comparison.values.items()]
    if all(np.ptp(off, axis=-1).max() <= near < np.abs(off).max() for off in offs):
        return TermOfPartOfClasses(named)  # a softmax sends back a number of its own to every class
    held, parts = _joined(comparison)
    wanted, size = comparison.wanted, comparison.wanted.shape[-1]
    is_label = wanted < -near
    is_row = is_label.sum(axis=-1) == 1
    rows = [array[is_row] for array in (held, wanted, is_label)]
    if len(parts) < 2 or size < FEW or len(rows[0]) < FEW or not np.isfinite(held).all():
        return None
    if _are_labels_of_others(rows, parts, near):
        return LabelOutsidePart(named)
    op = _own_statistic(rows, parts, near)
    return SoftmaxOfPart(named, op) if op is not None else None


def _joined(comparison: Compared) -> tuple[Values, list[Indices]]:
    """Return what ranks have, put together, NaN where no rank has it, and which classes each different part has.

    Not all ranks have it: with pipeline stages only the last one has a loss.
    """
    places = np.arange(comparison.wanted.size, dtype=np.int64).reshape(comparison.wanted.shape)
    held = np.full(places.shape, np.nan)
    parts: dict[bytes, Indices] = {}
    for rank, values in comparison.values.items():
        at = comparison.part(places, rank)
        held.ravel()[at] = values
        classes = np.unique(at % comparison.wanted.shape[-1])
        parts[classes.tobytes()] = classes
    return held, list(parts.values())


def _are_labels_of_others(rows: Sequence[Values], parts: Sequence[Indices], near: float) -> bool:
    """Whether each part without a row's label takes exactly one of its classes for the label."""
    held, wanted, is_label = rows
    off = held - wanted
    some = 0
    for classes in parts:
        is_other = ~np.any(is_label[:, classes], axis=-1)
        is_off = np.abs(off[:, classes]) > near
        if np.any(is_off[~is_other]) or np.any(off[:, classes] > near) or np.any(is_off.sum(axis=-1) > 1):
            return False
        some += int(np.all(is_off[is_other].sum(axis=-1) == 1) and np.any(is_other))
    return some == len(parts)


def _own_statistic(rows: Sequence[Values], parts: Sequence[Indices], near: float) -> Literal["max", "sum"] | None:
    """Return the statistic that the softmax of each part takes of its own classes; None if it takes neither.

    By the factor of the part that has the label, the gradient there says what number the row counts.
    """
    held, wanted, is_label = rows
    factors = np.ones((len(held), len(parts)))
    for at, classes in enumerate(parts):
        of_part, expected = (np.where(is_label, 0.0, side)[:, classes] for side in (held, wanted))
        size = np.maximum((expected**2).sum(axis=-1), np.finfo(float).tiny)
        factors[:, at] = factor = (of_part * expected).sum(axis=-1) / size
        if np.any(np.abs(of_part - factor[:, None] * expected) > near * np.maximum(1, factor[:, None])):
            return None
    of_label = [np.any(is_label[:, classes], axis=-1) for classes in parts]
    own = np.stack(of_label, axis=-1)
    factor = factors[own]
    is_known = np.abs(factor - 1) > CANCELED
    if is_known.sum() < FEW:
        return None
    factors, factor, held, wanted, is_label = (each[is_known] for each in (factors, factor, held, wanted, is_label))
    numbers = (held[is_label] - factor * wanted[is_label]) / (factor - 1)
    if not np.all(numbers > 0):
        return None
    softmax = wanted / numbers[:, None] + is_label
    sums = np.stack([softmax[:, classes].sum(axis=-1) for classes in parts], axis=-1)
    peaks = np.stack([softmax[:, classes].max(axis=-1) for classes in parts], axis=-1)
    if np.any(peaks <= 0):
        return None
    ways: dict[Literal["max", "sum"], Values] = {
        "max": 1 / peaks / (sums / peaks).sum(axis=-1, keepdims=True),
        "sum": 1 / sums,
    }
    return next((op for op, due in ways.items() if np.allclose(factors, due, rtol=LEAST_STATISTIC, atol=0)), None)
