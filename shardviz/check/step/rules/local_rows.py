"""Gradients of which each wrong rank has one wrong row, at the same index of its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import spans
from shardviz.explain.step.gradients import SlicesWithoutGradient
from shardviz.layout.region import Region, indices
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from shardviz.check.step.comparison import Compared
    from shardviz.explain.finding import Finding

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
