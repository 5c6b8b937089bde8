"""Ranks that share the features of a layer and are given different rows, although no row of theirs is compared.

What ranks return says which axis splits features: a linear layer whose weight is split over the axis returns a part of
them. Under FSDP, which splits the same weights, it returns all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.trace.traces import Kept, Point, Weight, counts_per_forward
from shardviz.dump.records.trace import Place, What
from shardviz.explain.step.whole_step import RowsOfPeers
from shardviz.layout.splits import axes_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.check.step.jobs.starts import Belonging
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.layout.mesh import Mesh

SIDES: tuple[What, What] = ("input", "output")


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a job, compared with that of one process.

    Attributes:
        axes: The axes that split the rows of its weight.
        factor: How many times fewer features ranks return; 0 if they also have other rows than they were given.
    """

    module: str
    axes: frozenset[str]
    factor: int


def rows_of_peers(
    reference: WholeJob,
    job: WholeJob,
    parts: Mapping[str, Mapping[int, Weight]],
    belongings: Mapping[str, Belonging],
) -> RowsOfPeers | None:
    """Return the cause if ranks along an axis that splits features were given different rows of one shape.

    Args:
        reference: A job of one process.
        parts: What its ranks have of each weight.
        belongings: Where weights belong that claim nothing.
    """
    batches = {rank: own.batch[0] for rank, own in job.job.ranks.items() if own.batch}
    given = next(iter(reference.batches()), [])
    shapes = [*{batch.shape: None for batch in batches.values()}]
    is_of_rows = given and len(shapes) == 1 and shapes[0] and given[0].shape[1:] == shapes[0][1:]
    if not (reference.is_of_one and is_of_rows and shapes[0][0]):
        return None
    layers = list(_linears(reference, job, parts, belongings, given[0].shape[0] / shapes[0][0]))
    sizes = {axis: job.mesh.axis_size(axis) for axis in job.mesh.axes}
    alone = {(axis, layer.factor) for layer in layers if len(layer.axes) == 1 for axis in layer.axes}
    of_data = {axis for axis, size in sizes.items() if (axis, 1) in alone and (axis, size) not in alone}
    for layer in layers:
        for axis in layer.axes - of_data if len(layer.axes - of_data) == 1 else ():
            if layer.factor == sizes[axis] and _differ_along(axis, batches, job.mesh):
                return RowsOfPeers(layer.module, axis, is_only_axis=max(sizes.values()) == job.mesh.size)
    return None


def _linears(
    reference: WholeJob,
    job: WholeJob,
    parts: Mapping[str, Mapping[int, Weight]],
    belongings: Mapping[str, Belonging],
    shares: float,
) -> Iterator[Linear]:
    """Yield the layers whose weights are split along their first dim, which counts the features that they return."""
    counts, first = counts_per_forward(reference.counts), min(job.job.ranks)
    whole, of_rank = (each.job.ranks[min(each.job.ranks)].points(counts) for each in (reference, job))
    for name in (name for name in parts if name.endswith(".weight") and first in parts[name]):
        module, belonging = name.removesuffix(".weight"), belongings.get(name)
        layout = parts[name][first].layout or (belonging.layout if belonging is not None else None)
        given, returned, own_given, own_returned = (
            _shape(points, Place(module, 0, what, 0)) for points in (whole, of_rank) for what in SIDES
        )
        if layout is None or not (given and returned and own_given and own_returned and own_returned[-1]):
            continue
        axes = frozenset({*axes_in(layout.chains[0])} & {*job.mesh.long_axes})
        if axes and layout.shape[0] == returned[-1]:
            yield Linear(
                module, axes, returned[-1] // own_returned[-1] if _rows(given) == _rows(own_given) * shares else 0
            )


def _rows(shape: tuple[int, ...]) -> int:
    """Return of how many rows of features a tensor is: those of the batch and of a sequence, in any order."""
    return math.prod(shape[:-1])


def _shape(points: Mapping[Place, Point], place: Place) -> tuple[int, ...]:
    values = points[place].values if place in points else None
    return () if values is None else values.shape


def _differ_along(axis: str, batches: Mapping[int, Kept], mesh: Mesh) -> bool:
    """Whether no group of ranks along an axis was given the same rows."""
    groups = [[batches[rank].values for rank in group if rank in batches] for group in mesh.groups(axis)]
    return all(len(group) > 1 and not all(np.array_equal(group[0], rows) for rows in group[1:]) for group in groups)
