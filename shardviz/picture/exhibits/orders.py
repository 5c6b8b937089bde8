"""Elements in another order than expected, and what collectives gave beside what is right."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.rules.intent import wanted_layout
from shardviz.check.order.rules.sequence import PairOfOrders
from shardviz.check.step.collectives import CallResults, Gathered, gathered_ids, values_of
from shardviz.layout.mesh import ranks_by
from shardviz.layout.region import Region, index_of
from shardviz.layout.splits import chunks
from shardviz.picture.exhibits.exhibit import MOST_CELLS, MOST_ROWS, Cell, Exhibit, Row, due_and_held, exhibit, title_of
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case, LaidOut
    from shardviz.check.step.collectives import Wrong
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.tensors import GatherRecord, Stamp
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.region import Range, Ranges


MOST_POSITIONS = 12

MOST_SHARDS = 32
"""Shards that are looked at for one that is out of order, if a tensor is large."""

MAX_ELEMENTS = 1 << 20
"""Larger shards are not laid out element by element for a picture, and of larger tensors only the first shards."""


def along_shards(dump: Dump, finding: Finding, cases: LaidOut) -> Exhibit | None:
    """Show expected and actual indices by local position, if a shard isn't in rising order.

    Blocks on the wrong ranks are seen on the map; this is for what the map cannot show, the order within a shard.
    """
    tensor = dump.stamped.get(finding.tensor)
    for case in cases.cases(tensor, finding.tensor) if tensor is not None else ():
        most = None if math.prod(case.shape) <= MAX_ELEMENTS else MOST_SHARDS
        lines = {coord: line for coord in list(case.shards)[:most] if (line := _line(case, coord)) is not None}
        if any(_is_falling(held) for _, _, held in lines.values()):
            return _positions(case, lines, len(finding.ranks))
    return None


Line = tuple[int, "NDArray[np.int64]", "NDArray[np.int64]"]
"""The dim, and along it the indices that a shard should hold and holds."""


def _line(case: Case, coord: Coord) -> Line | None:
    """Return the dim along which a shard first differs, through the first element that does."""
    if case.claimed is None or case.claimed.flat is not None:
        return None
    due = case.claimed.region(coord)
    if due.size > MAX_ELEMENTS or due.shape != case.shards[coord].body.local_shape:
        return None
    claimed, held = due.flat_ids(case.shape), case.local_ids(coord) - 1
    differs = (claimed != held) & (held >= 0)
    if claimed.shape != held.shape or not differs.any():
        return None
    at = np.unravel_index(int(np.argmax(differs)), claimed.shape)
    places = [np.unravel_index(ids[at], case.shape) for ids in (claimed, held)]
    dim = next(dim for dim, pair in enumerate(zip(*places, strict=True)) if pair[0] != pair[1])
    through = tuple(slice(None) if other == dim else index for other, index in enumerate(at))
    along = [np.unravel_index(np.maximum(ids[through], 0), case.shape)[dim] for ids in (claimed, held)]
    return dim, along[0], along[1]


def _is_falling(held: NDArray[np.int64]) -> bool:
    return bool(np.any(np.diff(held) < 0))


def _first_difference(due: NDArray[np.int64], held: NDArray[np.int64]) -> int:
    """Return the first position that is not as it should be; 0 if all of them are shown."""
    return int(np.argmax(due != held)) if len(due) > MOST_POSITIONS else 0


def _positions(case: Case, lines: dict[Coord, Line], num_wrong: int) -> Exhibit | None:
    """Show actual indices below expected ones; ranks with equal indices share two rows.

    Only the first dim that is out of order is shown, from its first wrong position. Ranks that differ elsewhere are
    counted.
    """
    dim = next(dim for dim, _, held in lines.values() if _is_falling(held))
    along = {case.rank(coord): (due, held) for coord, (own, due, held) in lines.items() if own == dim}
    begin = min(_first_difference(due, held) for due, held in along.values())
    shown = slice(begin, begin + MOST_POSITIONS)
    alike = ranks_by((rank, tuple(tuple(map(str, side[shown])) for side in pair)) for rank, pair in along.items())
    odd = [(pair, ranks) for pair, ranks in alike.items() if pair[0] != pair[1]]
    rows: list[Row] = []
    for (due, has), ranks in odd[: MOST_ROWS // 2]:
        rows += due_and_held(ranks, case.mesh, due, has)
    count = max(len(row.cells) for row in rows)
    heads = [str(position) for position in range(begin, begin + count)]
    caption = f"the global index along dim {dim} at each local position"
    left_out = max(num_wrong - sum(row.count for row in rows), 0)
    return exhibit(caption, ("local position", *heads), rows, left_out, noun="rank")


def along_sequence(finding: Finding, mesh: Mesh) -> Exhibit | None:
    """Show the sequence positions that each rank has of this tensor and of its counterpart."""
    pair = next((pair for pair in finding.pairs if isinstance(pair, PairOfOrders)), None)
    if pair is None:
        return None
    order, usual = pair.tensor, pair.usual
    texts = ((rank, [_stretches(one.held[rank]) for one in (usual, order)]) for rank in pair.ranks)
    alike = ranks_by((rank, (due, has, rank in finding.ranks)) for rank, (due, has) in texts)
    rows = [
        Row(title_of(ranks, mesh), (Cell(due), Cell(has, is_wrong)), len(ranks))
        for (due, has, is_wrong), ranks in sorted(alike.items(), key=lambda one: not one[0][-1])
    ]
    return exhibit("positions along the sequence", ("", usual.name, order.name), rows, noun="rank")


def _stretches(ranges: Ranges) -> str:
    """Write positions as they lie in memory: `0:6, 42:48`."""
    return ", ".join(f"{start}:{stop}" for start, stop in ranges) or "nothing"


def of_each_segment(dump: Dump, finding: Finding, cases: LaidOut) -> Exhibit | None:
    """Show expected and actual parts of each segment, if the intended layout has segments."""
    tensor = dump.stamped.get(finding.tensor)
    for case in cases.cases(tensor, finding.tensor) if tensor is not None and finding.intended else ():
        if (wanted := wanted_layout(case, finding.intended)) is not None:
            for dim, segments in _segmented(wanted):
                return _segments_exhibit(case, wanted, dim, segments)
    return None


def _segmented(layout: Layout) -> Iterator[tuple[int, list[Range]]]:
    """Yield the dims that are cut into segments first, with their first segments."""
    for dim, (size, chain) in enumerate(zip(layout.shape, layout.chains, strict=True)):
        if chain and isinstance(chain[0], int) and layout.flat is None:
            yield dim, [part[0] for part in islice(chunks(((0, size),), chain[0]), MOST_CELLS)]


def _segments_exhibit(case: Case, wanted: Layout, dim: int, segments: Sequence[Range]) -> Exhibit | None:
    """Lay what ranks hold of each segment below what they should; ranks that agree are left out."""
    sides = ((coord, (wanted.region(coord), region)) for coord, region in case.regions.items())
    alike = ranks_by(
        (case.rank(coord), tuple(_texts(one.dims[dim], segments) for one in pair)) for coord, pair in sides
    )
    rows: list[Row] = []
    for (due, has), ranks in alike.items():
        rows += due_and_held(ranks, case.mesh, due, has) if due != has else ()
    heads = [f"segment {number}" for number in range(len(segments))]
    sizes = {stop - start for start, stop in segments}
    each = f", {sizes.pop():,} each" if len(sizes) == 1 else ""
    return exhibit(f"what ranks have of the segments of dim {dim}{each}", ("", *heads), rows, noun="rank")


def _texts(ranges: Ranges, segments: Sequence[Range]) -> tuple[str, ...]:
    """Write the indices that lie in each segment."""
    return tuple(_ranges_text(ranges, *segment) for segment in segments)


def _ranges_text(ranges: Ranges, start: int, stop: int) -> str:
    inside = tuple((max(low, start), min(high, stop)) for low, high in ranges if low < stop and high > start)
    return str(Region((inside,))) if inside else "nothing"


HEADS = ("", "stretch", "expected", "got")


def out_of_place(finding: Finding) -> Exhibit | None:
    """Show what ranks got from a collective, one stretch a row, if it isn't the tensor in order."""
    for pair in finding.pairs:
        if isinstance(pair, Gathered):
            alike = ranks_by(pair.records.items())
            found = [_rows(pair.dump, pair.stamp, record, own) for record, own in alike.items()]
            shown = [row for rows, _ in found for row in rows]
            left_out = sum(more for _, more in found)
            return exhibit(f"what {pair.call}() gives, stretch by stretch", HEADS, shown, left_out, noun="part")
    return None


def _rows(dump: Dump, stamp: Stamp, record: GatherRecord, ranks: list[int]) -> tuple[list[Row], int]:
    """Return a row for each of the first misplaced stretches, and how many more there are."""
    title, numel = title_of(ranks, dump.files.mesh), math.prod(stamp.shape)
    ids = gathered_ids(dump, stamp, record) if not record.error else None
    if ids is None or len(ids) != numel:
        cells = (Cell(counted(numel, "element")), Cell(""), Cell(_result_text(record, ids), is_wrong=True))
        return [Row(title, cells)], 0
    stretches = _out_of_order(ids)
    rows = [_row(stamp, ids, *stretch) for stretch in stretches[: MOST_ROWS * 2]]
    return [replace(row, title=title) for row in rows], len(stretches) - len(rows)


def _result_text(record: GatherRecord, ids: NDArray[np.int64] | None) -> str:
    if record.error:
        return f"raised {record.error}"
    return counted(len(ids), "element") if ids is not None else "a tensor of a different shape"


def _row(stamp: Stamp, ids: NDArray[np.int64], start: int, stop: int) -> Row:
    own = int(ids[start])
    is_own = 1 <= own <= len(ids)
    got = f"from {index_of(own - 1, stamp.shape)}" if is_own else "no element of the tensor"
    expected = Cell(f"from {index_of(start, stamp.shape)}")
    return Row("", (Cell(counted(stop - start, "element")), expected, Cell(got, is_wrong=True)))


def _out_of_order(ids: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return where stretches of neighbors that are out of place together begin and end."""
    shift = ids - np.arange(1, len(ids) + 1)
    cuts = [0, *(np.flatnonzero(np.diff(shift)) + 1).tolist(), len(ids)]
    return [(start, stop) for start, stop in pairwise(cuts) if shift[start]]


def beside_definition(dump: Dump, finding: Finding) -> Exhibit | None:
    """Show what each rank of the first wrong group passed to a call, got and should have got."""
    pair = next((pair for pair in finding.pairs if isinstance(pair, CallResults)), None)
    if pair is None:
        return None
    call = next(iter(pair.wrong.values())).call
    wrong = {rank: one for rank, one in pair.wrong.items() if one.call == call}
    order = sorted(call.ranks, key=lambda rank: rank not in wrong)
    rows = [_row_of_call(dump, call.module, rank, wrong.get(rank)) for rank in order[: MOST_ROWS * 2]]
    caption = f"{call.op} over {title_of(call.ranks)}"
    return exhibit(caption, ("", "had", "got", "expected"), rows, len(order) - len(rows), noun="rank")


def _row_of_call(dump: Dump, name: str, rank: int, wrong: Wrong | None) -> Row:
    had, got = values_of(dump, f"{name}.before", rank), values_of(dump, name, rank)
    expected = Cell(_values_text(wrong.expected)) if wrong is not None else Cell("")
    return Row(title_of([rank]), (Cell(_values_text(had)), Cell(_values_text(got), wrong is not None), expected))


def _values_text(values: NDArray[np.float64]) -> str:
    return f"[{listed((f'{value:.6g}' for value in values.ravel()[: MOST_CELLS + 1]), MOST_CELLS)}]"
