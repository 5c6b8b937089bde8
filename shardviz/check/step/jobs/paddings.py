"""Weights that a job pads, so that ranks have equal parts of them: what is behind the other job's last slice.

Programs pad a vocabulary, or features, to a multiple of what divides them. What stands there is nobody's to judge: the
rest is compared. Padding that is read shows in what the model computes, some of it only once it was trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.starts import are_equal_parts
from shardviz.check.step.trace.traces import JobTrace, Weight
from shardviz.explain.step.losses import PaddingRead
from shardviz.explain.step.modules import UnexplainedModule
from shardviz.explain.step.whole_step import UnexplainedBackward, UnexplainedForward
from shardviz.layout.layout import Layout, padded_shapes, shared_placements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.check.step.jobs.starts import PartsByName
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Kept
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region


@dataclass(frozen=True, slots=True)
class Unpadded:
    """A weight that a job pads.

    Attributes:
        shape: Its shape without padding.
        padded: Its shape with padding.
        regions: Which region of that each rank has.
        held: The shape that each rank has with padding.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    regions: Mapping[int, Region]
    held: Mapping[int, tuple[int, ...]]

    def part(self, rank: int, weight: Weight) -> Weight:
        """Return what a rank has of the weight, or of what belongs to it and has its dims, without padding."""
        own = weight.values.shape if weight.values is not None else ()
        if own not in (self.held[rank], self.padded):  # as a state of its rows, or of a part of them
            return weight
        layout = None if weight.layout is None else replace(weight.layout, shape=self.shape)
        region = self.regions[rank] if layout is None else layout.region_of_rank(rank)
        values = None if weight.values is None else _first(weight.values, region.shape)
        return Weight(region.shape if layout is None else self.shape, layout, values)


def paddings_of(full: Mapping[str, Weight], parts: PartsByName, mesh: Mesh) -> dict[str, Unpadded]:
    """Return the weights that a job pads, by name.

    Args:
        full: The other job's weights, which are shorter.
        parts: What ranks of the job have of each.
    """
    both = ((name, full[name], own) for name, own in parts.items() if name in full)
    found = ((name, _unpadded(whole, own, mesh)) for name, whole, own in both)
    return {name: unpadded for name, unpadded in found if unpadded is not None}


def _first(kept: Kept, shape: tuple[int, ...]) -> Kept:
    """Return the first slices of what a rank has along each dim."""
    values, at = kept.values, kept.at
    for dim, size in enumerate(shape):
        here = at[dim] < size
        values, at = values.compress(here, dim), (*at[:dim], at[dim][here], *at[dim + 1 :])
    return replace(kept, shape=shape, values=values, at=at)


def with_padding_read(finding: Finding, job: WholeJob) -> Finding:
    """Return a finding of the model or the loss that no rule explains, with the words behind the last that it counts.

    What is masked or cut off gets no gradient. A softmax gives all rows of its words gradients that add up to zero,
    unless an embedding has the same weight.
    """
    is_open = isinstance(finding.explanation, UnexplainedBackward | UnexplainedForward | UnexplainedModule)
    gradients = JobTrace.weights(job, "grad") if is_open and not finding.module and job.padded else {}
    for name, unpadded in job.padded.items():
        for rank, gradient in gradients.get(name, {}).items():
            own = unpadded.part(rank, gradient).values
            held = gradient.values
            if held is None or own is None:
                continue
            is_read = np.count_nonzero(held.values) > np.count_nonzero(own.values)
            if is_read and unpadded.padded[0] > unpadded.shape[0] and _is_of_words(name, gradients[name], job):
                return finding.because(PaddingRead(0, unpadded.shape[0], unpadded.padded[0], weight=name))
    return finding


def _is_of_words(name: str, gradients: Mapping[int, Weight], job: WholeJob) -> bool:
    """Whether all rows of a weight, those of the padding with them, get what a softmax over them sends back."""
    if any(name in names for record in job.records.values() for names in record.tied):
        return True
    kept = [part.values for part in gradients.values() if part.values is not None]
    parts = {part.values.tobytes(): part.values for part in kept}
    total = sum((part.sum(axis=0) for part in parts.values()), np.zeros(()))
    size = sum((np.abs(part).sum(axis=0) for part in parts.values()), np.zeros(()))
    near = max((part.tolerance for part in kept), default=0.0)
    return bool(np.all(np.abs(total) <= near * np.max(size, initial=0.0)))


def _unpadded(whole: Weight, parts: Mapping[int, Weight], mesh: Mesh) -> Unpadded | None:
    """Return a weight whose parts together are longer than it, if they have all of it; None if they don't."""
    kept = {rank: part.values for rank, part in parts.items() if part.values is not None}
    if whole.values is None or not kept or len(kept) < len(parts):
        return None

    shapes = {rank: part.shape for rank, part in kept.items()}

    def fits(rank: int, region: Region) -> bool:
        own = region.clipped(whole.shape)
        assert whole.values is not None
        return are_equal_parts(whole.values, _first(kept[rank], own.shape), own)

    layouts = {rank: part.layout for rank, part in parts.items() if part.layout is not None}
    if len(layouts) == len(parts):
        first = next(iter(layouts.values()))
        regions = {rank: layout.region_of_rank(rank) for rank, layout in layouts.items()}
        is_longer = not first.flat and first.shape in padded_shapes(whole.shape, first.shape, (1,))
        are_parts = is_longer and all(_is_cut_alike(layout, whole.shape, rank) for rank, layout in layouts.items())
        are_parts = are_parts and all(fits(rank, region) for rank, region in regions.items())
        own = {rank: region.clipped(whole.shape) for rank, region in regions.items()} if are_parts else {}
        return Unpadded(whole.shape, first.shape, own, shapes) if are_parts else None
    if layouts:
        return None
    sizes = sorted({math.prod(mesh.shape[axis] for axis in axes) for axes in _choices(mesh.ndim)})
    for padded in padded_shapes(whole.shape, shapes[min(shapes)], sizes):
        placements = shared_placements(padded, shapes, mesh, fits)
        if placements is not None:
            layout = Layout.from_placements(mesh, padded, placements)
            regions = {rank: layout.region_of_rank(rank).clipped(whole.shape) for rank in parts}
            return Unpadded(whole.shape, padded, regions, shapes)
    return None


def _is_cut_alike(layout: Layout, shape: tuple[int, ...], rank: int) -> bool:
    """Whether a rank has the same slices of a shorter tensor, cut by the same placements, as of a padded one."""
    return layout.region_of_rank(rank).clipped(shape) == replace(layout, shape=shape).region_of_rank(rank)


def _choices(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(count + 1):
        yield from combinations(range(count), size)
