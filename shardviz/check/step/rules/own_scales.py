"""Gradients that no rank reduced before it scaled its own: with a factor for each rank their sum is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.explain.step.norms import ScaledBeforeReduction
from shardviz.relate.tolerance import FEW
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence

MAX_LISTED = 4


def scaled_before_reduction(evidence: Evidence, comparison: Compared) -> ScaledBeforeReduction | None:
    """Return the cause of a gradient that each rank scaled before any reduction; None if that doesn't explain it."""
    if comparison.role != "grad" or evidence.batch is None:
        return None
    for axis in comparison.copies_differ_along:
        alike = [one for one in evidence.gradients.values() if axis in one.copies_differ_along]
        groups = comparison.mesh.groups(axis)
        solved = [own_scales(alike, group) for group in groups]
        if all(one is not None for one in solved):
            scales = {rank: scale for one in solved for rank, scale in (one or {}).items()}
            text = listed([f"{scales[rank]:.3g} on rank {rank}" for rank in sorted(scales)], MAX_LISTED)
            return ScaledBeforeReduction((axis,), "AVG" if evidence.batch.get(axis) else "SUM", text)
    return None


def scaled_text(comparison: Compared, cause: ScaledBeforeReduction) -> str:
    """Say what ranks have of a gradient, and what it would be without their own numbers."""
    over, mean = " and ".join(cause.axes), "mean" if cause.op == "AVG" else "sum"
    return (
        f"the {comparison.what} differs along {over}: ranks multiplied theirs by numbers of their own "
        f"({cause.scales}); without that their {mean} is {comparison.whose}"
    )


def own_scales(gradients: Sequence[Compared], group: Sequence[int]) -> Mapping[int, float] | None:
    """Return by what each rank of a group multiplied its gradients, if their mean is right without that; else None.

    The same number for each rank must do for all gradients, which are many more equations than numbers.
    """
    if not gradients or not all({*group} <= one.reduced.keys() for one in gradients):
        return None
    columns = [np.concatenate([one.reduced[rank].ravel() for one in gradients]) for rank in group]
    wanted = np.concatenate([one.wanted_of(group[0]).ravel() for one in gradients])
    if len({column.size for column in columns}) > 1 or columns[0].size != wanted.size:
        return None
    matrix = np.stack(columns, axis=-1)
    if len(wanted) < FEW * len(group) or not np.isfinite(matrix).all() or not np.isfinite(wanted).all():
        return None
    shares, _, rank_of_matrix, _ = np.linalg.lstsq(matrix, wanted, rcond=None)
    if rank_of_matrix < len(group) or np.any(shares <= 0):
        return None
    begin, fitted = 0, matrix @ shares
    for one in gradients:
        expected = one.wanted_of(group[0])
        if not one.near(fitted[begin : begin + expected.size].reshape(expected.shape), expected):
            return None
        begin += expected.size
    return {rank: 1 / float(share * len(group)) for rank, share in zip(group, shares, strict=True)}
