"""The judge as the ranks of a probe ask it while they wait: rank 0 imports `judge` by its name and calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.whole_job import put_together
from shardviz.check.step.trace.arguments import arguments_of_rank, differing_arguments
from shardviz.check.step.trace.calls import parted_modules
from shardviz.check.step.trace.judging import Judging, Noise
from shardviz.check.step.trace.traces import JobTrace, Kept, Point, joined_rows, read_trace
from shardviz.dump.arrays import apart, sketch
from shardviz.dump.records.trace import ArgumentRecord, Place, SketchRecord, StepAnswer
from shardviz.dump.write import MOVED_FOLDER, TRACE_FOLDER
from shardviz.layout.layout import Layout
from shardviz.relate.tolerance import EPSILON

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh

    Sides = Sequence[NDArray[np.float64]]

MAX_WHOLE = 1 << 20
"""Of the wrong places ranks write values into the dump, no more elements than this of the whole's."""

MAX_REPLAYED = 1 << 21
"""Modules are run again on no more elements than this."""


def judge(
    folder: Path, whole: Path, mesh: Mesh, *, counts: Mapping[str, int], dim: int, is_pipeline: bool, is_forward: bool
) -> StepJudge:
    """Judge the step whose values ranks have written.

    Args:
        folder: Where each rank wrote what it had.
        whole: Where rank 0 wrote what the unsharded model had; in a folder in it what that had from weights and batch
            that were moved by a rounding, if the step is in narrow numbers.
        counts: How often each module is called in one forward of the batch; its calls after that are of other parts.
        dim: The dim of the batch that was parted.
        is_pipeline: Whether a rank's model is a stage of the unsharded one, so that the model itself is no module to
            compare.
        is_forward: Whether the two have only the forward in common.
    """
    sharded, unsharded = read_trace(folder / TRACE_FOLDER), read_trace(whole / TRACE_FOLDER)
    parted = {"", *parted_modules(sharded.ranks)} if is_pipeline else ()
    of_stages = {name: count for name, count in counts.items() if name not in parted}
    own_rows = joined_rows(own.rows(of_stages) for own in sharded.ranks.values())

    def points(trace: JobTrace) -> dict[Place, Point]:
        every = trace.ranks[0].points(counts, dim, own_rows)
        return {place: point for place, point in every.items() if not (is_forward and place.is_gradient)}

    noise = None
    moved = whole / MOVED_FOLDER / TRACE_FOLDER
    if moved.exists():
        records = (*sharded.dump.files.ranks.values(), *unsharded.dump.files.ranks.values())
        dtypes = {dtype for record in records for dtype in record.narrowed_to}
        noise = Noise(points(read_trace(moved)), max((EPSILON.get(dtype, 0.0) for dtype in dtypes), default=0.0))
    rows = unsharded.ranks[0].rows(counts, dim)
    ranks = {rank: own.points(of_stages, rows=rows) for rank, own in sharded.ranks.items()}
    arguments = {rank: arguments_of_rank(own, of_stages) for rank, own in sharded.ranks.items()}
    called = {rank: {record.module for record in own.records} for rank, own in sharded.ranks.items()}
    differing = differing_arguments(arguments_of_rank(unsharded.ranks[0], counts), arguments, mesh, called)
    return StepJudge(Judging(points(unsharded), ranks, mesh, noise), counts, differing)


@dataclass(frozen=True)
class StepJudge:
    """A step that was judged.

    Attributes:
        judging: What each rank has at every place.
        counts: How often each module is called in one forward of the batch.
        arguments: Each rank's arguments of modules that differ and are no tensors of floating point.
    """

    judging: Judging
    counts: Mapping[str, int]
    arguments: Mapping[int, tuple[ArgumentRecord, ...]]

    def answer(self) -> StepAnswer:
        """Return what all ranks write down."""
        with np.errstate(all="ignore"):  # a step that went wrong has NaN
            judgments = self.judging.judgments
            layouts = {place: one.layout for place, one in judgments.items() if one.layout is not None}
            judged_inputs = [one for place, one in judgments.items() if not place.module and place.what == "input"]
            return StepAnswer(
                {rank: tuple(self.judging.records(rank)) for rank in self.judging.ranks},
                tuple(self._written()),
                layouts,
                sum(map(self._num_right, self.judging.ranks)),
                any("odd" in one.state.values() for one in judged_inputs),
                self.arguments,
            )

    def _written(self) -> Iterator[Place]:
        """Yield the wrong places of which values are written down: as many as are not too large."""
        elements = 0
        for place in self.judging.wrong:
            whole = self.judging.whole[place].values
            elements += whole.values.size if whole is not None else 0
            if elements <= MAX_WHOLE:
                yield place

    def _num_right(self, rank: int) -> int:
        """Return how many inputs and outputs are the whole's before the first that is not."""
        judgments = self.judging.judgments
        forward_places = [place for place in self.judging.ranks[rank] if place in judgments and not place.is_gradient]
        states = [judgments[place].state.get(rank) for place in forward_places]
        return states.index("odd") if "odd" in states else len(states)

    def sketches(self) -> Iterator[SketchRecord]:
        """Yield the whole's points in few numbers."""
        moved = self.judging.noise.points if self.judging.noise is not None else {}
        for place, point in self.judging.whole.items():
            if point.values is None:
                continue
            numbers, moved_values = sketch(point.values.values), moved[place].values if place in moved else None
            noise = apart(numbers, sketch(moved_values.values)) if moved_values is not None else 0.0
            noise = noise if noise < float("inf") else 0.0
            dtype, shape = point.values.dtype, point.values.shape
            yield SketchRecord(
                place.module, place.what, dtype, shape, numbers, point.order, place.call, place.tensor, noise
            )

    def sides(self, modules: Sequence[str]) -> Iterator[tuple[str, Sides, Sides]]:
        """Yield what modules that are called once were given, forward and backward, on both sides."""
        budget = MAX_REPLAYED
        for name in (name for name in modules if self.counts.get(name) == 1):
            places = Place(name, 0, "input", 0), Place(name, 0, "gradient of output", 0)
            sharded = [together.values for place in places if (together := self._together(place)) is not None]
            wholes = [self.judging.whole[place].values for place in places if place in self.judging.whole]
            unsharded = [kept.values for kept in wholes if kept is not None]
            size = sum(values.size for values in unsharded)
            if len(sharded) == len(unsharded) == len(places) and size <= budget:
                budget -= size
                yield name, sharded, unsharded

    def _together(self, place: Place) -> Kept | None:
        """Put all ranks' values at a place together, in the whole's scale; None if some are missing."""
        judgment = self.judging.judgments.get(place)
        whole = self.judging.whole[place].values if judgment is not None else None
        if judgment is None or judgment.layout is None or whole is None or set(judgment.state.values()) != {"right"}:
            return None
        layout = Layout.from_placements(self.judging.mesh, whole.shape, judgment.layout)
        parts = {
            rank: kept.with_values(kept.values / self.judging.scale(place, rank))
            for rank, kept in self.judging.held(place).items()
        }
        return put_together(parts, dict.fromkeys(parts, layout))
