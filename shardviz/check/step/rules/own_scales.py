"""Gradients that each rank made wrong in a way of its own: a factor before any reduction, or one row of its part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import spans
from shardviz.explain.step.gradients import SlicesWithoutGradient
from shardviz.explain.step.norms import ScaledBeforeReduction
from shardviz.layout.region import Region, indices
from shardviz.relate.tolerance import FEW, SINGLE
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh


MAX_LISTED = 4


def scaled_before_reduction(evidence: Evidence, comparison: Compared) -> ScaledBeforeReduction | None:
    """Return the cause of a gradient that each rank scaled before any reduction; None if that doesn't explain it."""
    if comparison.role != "grad" or evidence.batch is None:
        return None
    for axis in comparison.copies_differ_along:
        if scales := evidence.own_scales.get(axis):
            text = listed([f"{scales[rank]:.3g} on rank {rank}" for rank in sorted(scales)], MAX_LISTED)
            return ScaledBeforeReduction((axis,), "AVG" if evidence.batch.get(axis) else "SUM", text)
    return None


def scales_along(axis: str, gradients: Iterable[Compared], mesh: Mesh, *, is_mean: bool) -> Mapping[int, float]:
    """Return by what each rank multiplied its gradients before any reduction over an axis; empty if that isn't shown.

    Shares that add up to 1 are those of rows, of which ranks have unequal numbers: nothing multiplied the gradients.
    Nor did ranks use numbers of their own if all have the same.
    """
    alike = [one for one in gradients if axis in one.copies_differ_along]
    scales: dict[int, float] = {}
    for group in mesh.groups(axis):
        shares = own_shares(alike, group)
        is_of_rows = shares is None or math.isclose(sum(shares.values()), 1, rel_tol=SINGLE)
        if shares is None or is_of_rows or math.isclose(min(shares.values()), max(shares.values()), rel_tol=SINGLE):
            return {}
        scales |= {rank: 1 / share / (len(group) if is_mean else 1) for rank, share in shares.items()}
    return scales


def scaled_text(comparison: Compared, cause: ScaledBeforeReduction) -> str:
    """Say what ranks have of a gradient, and what it would be without their own numbers."""
    over, mean = " and ".join(cause.axes), "mean" if cause.op == "AVG" else "sum"
    return (
        f"the {comparison.what} differs along {over}: ranks multiplied theirs by numbers of their own "
        f"({cause.scales}); without that their {mean} is {comparison.whose}"
    )


def own_shares(gradients: Sequence[Compared], group: Sequence[int]) -> Mapping[int, float] | None:
    """Return the share of each rank's gradients with which a group's add up to the right ones; None if none do.

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
    return {rank: float(share) for rank, share in zip(group, shares, strict=True)}


MIN_ROWS = 3
"""In a part of fewer rows one is alike by chance."""


def check_local_row(comparison: Compared) -> Finding | None:
    """Return the finding if a weight's gradient is wrong in the row that an index of the whole is on ranks' own parts.

    On the rank whose part begins with the whole's first row both are the same, and its gradient is right.
    """
    regions = {rank: region for rank, region in comparison.regions.items() if isinstance(region, Region)}
    if comparison.role != "grad" or comparison.wanted.ndim < 2 or regions.keys() != comparison.values.keys():
        return None
    places = {rank: indices(region.dims[0]) for rank, region in regions.items()}
    if any(len(rows) < MIN_ROWS or len(rows) == comparison.wanted.shape[0] for rows in places.values()):
        return None
    wrong = {rank: wrong_rows(comparison, rank) for rank in comparison.wrong}
    rows = {tuple(own) for own in wrong.values()}
    right = [rank for rank in regions if rank not in wrong]
    if len(rows) != 1 or len(*rows) != 1 or not all(int(places[rank][0]) == 0 for rank in right) or not right:
        return None
    row = rows.pop()[0]
    due = {int(places[rank][row]) for rank in wrong}
    sentence = (
        f"the gradient is off on {named_ranks(comparison.wrong)} in row {row} of the rank's own part alone, which is "
        f"row {min(due)} of the whole{' and others' if len(due) > 1 else ''}"
    )
    cause = SlicesWithoutGradient(comparison.name, spans(sorted(due)), 0, comparison.wrong)
    return comparison.finding(cause, sentence, module=comparison.name.rpartition(".")[0])


def wrong_rows(comparison: Compared, rank: int) -> list[int]:
    """Return the rows of a rank's part that are off."""
    off = np.abs(comparison.reduced[rank] - comparison.wanted_of(rank))
    is_off = off.reshape(len(off), -1).max(axis=1, initial=0.0) > comparison.tolerance
    return [int(row) for row in np.flatnonzero(is_off)]
