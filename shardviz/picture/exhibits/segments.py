"""Dims that the model reads in segments, q, k and v or gate and up: what each rank has of each one, and should have."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from shardviz.check.order.rules.intent import wanted_layout
from shardviz.layout.region import Region
from shardviz.layout.splits import chunks
from shardviz.picture.exhibits.exhibit import MOST_CELLS, Exhibit, Row, due_and_held, exhibit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.order.case import Case
    from shardviz.check.order.laid_out import LaidOut
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.region import Range, Ranges


def of_each_segment(dump: Dump, finding: Finding, cases: LaidOut) -> Exhibit | None:
    """Return what ranks should have and do have of each segment of a dim, where its author says that it has some."""
    tensor = dump.stamped.get(finding.tensor)
    for case in cases.cases(tensor, finding.tensor) if tensor is not None and finding.intended else ():
        if (wanted := wanted_layout(case, finding.intended)) is not None:
            for dim, segments in _segmented(wanted):
                return _beside(case, wanted, dim, segments)
    return None


def _segmented(layout: Layout) -> Iterator[tuple[int, list[Range]]]:
    """Yield the dims that are cut into segments before anything distributes them, with the first segments of each."""
    for dim, (size, chain) in enumerate(zip(layout.shape, layout.chains, strict=True)):
        if chain and isinstance(chain[0], int) and layout.flat is None:
            yield dim, [part[0] for part in islice(chunks(((0, size),), chain[0]), MOST_CELLS)]


def _beside(case: Case, wanted: Layout, dim: int, segments: Sequence[Range]) -> Exhibit | None:
    """Lay what ranks hold of each segment below what they should; ranks that agree are left out."""
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for coord, region in case.regions.items():
        due, has = (_texts(ranges, segments) for ranges in (wanted.region(coord).dims[dim], region.dims[dim]))
        if due != has:
            found.setdefault((due, has), []).append(case.rank(coord))
    rows: list[Row] = []
    for (due, has), ranks in found.items():
        rows += due_and_held(ranks, case.mesh, due, has)
    heads = [f"segment {number}" for number in range(len(segments))]
    sizes = {stop - start for start, stop in segments}
    each = f", {sizes.pop():,} each" if len(sizes) == 1 else ""
    return exhibit(f"what ranks have of the segments of dim {dim}{each}", ("", *heads), rows, noun="rank")


def _texts(ranges: Ranges, segments: Sequence[Range]) -> tuple[str, ...]:
    """Write the indices that lie in each segment."""
    return tuple(_text(ranges, *segment) for segment in segments)


def _text(ranges: Ranges, start: int, stop: int) -> str:
    inside = tuple((max(low, start), min(high, stop)) for low, high in ranges if low < stop and high > start)
    return str(Region((inside,))) if inside else "nothing"
