"""Terms of a pending reduction, and terms added to the expected values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.candidates import num_splits
from shardviz.layout.placements import Partial, Replicate
from shardviz.relate.tolerance import FEW, SINGLE
from shardviz.relate.values import error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.candidates import Placements
    from shardviz.layout.mesh import Mesh
    from shardviz.relate.relations import Pending

    Values = NDArray[Any]

REDUCTIONS: Mapping[str, Callable[[Values], Values]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.max(0),
    "min": lambda stacked: stacked.min(0),
    "product": lambda stacked: stacked.prod(0),
}
"""What a pending reduction does to the stacked terms, by the names of torch's `Partial`."""

LIKELY = ("sum", "max", "min")
"""The reductions that are tried if none is claimed: an average is a sum and a factor."""


def reduced(
    held: Mapping[int, Values], mesh: Mesh, pending: Sequence[Pending], limit: float
) -> tuple[dict[int, Values], dict[int, float]]:
    """Reduce what ranks hold over axes.

    A group in which a rank is missing has no result: its sum is not known. Terms that are equal on all ranks of every
    group are copies, and nothing is pending.

    Args:
        held: What each rank holds.
        mesh: The mesh.
        pending: The axes, each with its reduction, in turn.
        limit: The relative error up to which terms are equal.

    Returns:
        For each rank the result, and the norm of the terms: a sum that cancels is rounded as its terms are. Both are
        empty if the terms are copies.
    """
    totals = {rank: np.asarray(values, np.float64) for rank, values in held.items()}
    squares = {rank: float(np.square(values).sum()) for rank, values in totals.items()}
    are_terms = False
    for axis, op in ((link.axis, link.op) for link in pending):
        groups = [[rank for rank in group if rank in totals] for group in mesh.groups(axis)]
        are_terms = are_terms or any(
            error_of(totals[rank], totals[ranks[0]]) > limit for ranks in groups for rank in ranks
        )
        totals = over(axis, op, totals, mesh)
        squares = {rank: sum(squares[member] for member in mesh.group_of(rank, axis)) for rank in totals}
    return (totals, {rank: math.sqrt(square) for rank, square in squares.items()}) if are_terms else ({}, {})


def over(axis: str, op: str, values: Mapping[int, Values], mesh: Mesh) -> dict[int, Values]:
    """Reduce values over an axis, leaving out groups with a missing rank or different shapes."""
    totals: dict[int, Values] = {}
    for group in mesh.groups(axis):
        terms = [values[rank] for rank in group if rank in values]
        if len(terms) == len(group) and len({term.shape for term in terms}) == 1:
            with np.errstate(invalid="ignore", over="ignore"):
                totals |= dict.fromkeys(group, REDUCTIONS[op](np.stack(terms)))
    return totals


def coefficient_of(actual: Sequence[Values], parts: Sequence[Values], terms: Sequence[Values]) -> float | None:
    """Solve `actual = scale * (part + coefficient * term)` for all ranks together.

    Args:
        actual: What some ranks hold.
        parts: What they should hold.
        terms: Their parts of what may have been added.

    Returns:
        The coefficient; None if the equations do not tell.
    """
    sides = (parts, terms, actual)
    columns = np.stack([np.concatenate([part.ravel() for part in side]) for side in sides]).astype(np.float64)
    if columns.shape[1] < FEW or not np.isfinite(columns).all():
        return None
    (scale, times), _, matrix_rank, _ = np.linalg.lstsq(columns[:2].T, columns[2], rcond=None)
    if matrix_rank < 2 or min(abs(scale), abs(times)) <= SINGLE:
        return None
    return float(times / scale)


def placements_of_sum(
    terms: Mapping[int, Values], mesh: Mesh, fits: Callable[[int, Values], Iterable[Placements]], near: float
) -> Placements | None:
    """Return placements of terms whose sum over one axis is right on every rank; or None.

    Args:
        terms: What every rank has that has the tensor.
        mesh: The mesh.
        fits: Returns the placements that give a rank these values.
        near: How far an element may be off. Terms that are as near to each other as this are one number times the
            whole on every rank, and no terms of it.
    """
    for axis in mesh.axes if terms and all(rank in mesh for rank in terms) else ():
        at = mesh.axis_index(axis)
        shared: set[Placements] | None = None
        for rank in terms:
            total = _total(terms, mesh.group_of(rank, axis), near)
            fitting = (
                {fit for fit in fits(rank, total) if isinstance(fit[at], Replicate)} if total is not None else set()
            )
            shared = fitting if shared is None else shared & fitting
            if not shared:
                break
        for placements in sorted(shared or (), key=num_splits):
            return (*placements[:at], Partial("sum"), *placements[at + 1 :])
    return None


def _total(terms: Mapping[int, Values], group: Sequence[int], near: float) -> Values | None:
    """Return a group's sum; None if a term is missing or shaped differently, or for copies."""
    present = [terms[rank] for rank in group if rank in terms]
    if len(group) < 2 or len(present) < len(group) or len({term.shape for term in present}) > 1:
        return None
    stacked = np.stack(present)
    if np.all(np.abs(stacked - stacked[:1]) <= near / len(group)):
        return None
    total: Values = stacked.sum(0)
    return total
