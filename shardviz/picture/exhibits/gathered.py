"""Results of collectives beside what is right: what torch gathers of a tensor, what the definition of a call gives."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.rules.reassembly import Gathered, gathered_ids
from shardviz.check.step.collectives import CallResults, values_of
from shardviz.layout.region import index_of
from shardviz.picture.exhibits.exhibit import MOST_CELLS, MOST_ROWS, Cell, Exhibit, Row, exhibit, title_of
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.check.step.collectives import Wrong
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.tensors import GatherRecord, Stamp
    from shardviz.explain.finding import Finding

HEADS = ("", "stretch", "expected", "got")


def out_of_place(finding: Finding) -> Exhibit | None:
    """Return what ranks got of a collective, stretch by stretch, where it is not the tensor in order."""
    for pair in finding.pairs:
        if isinstance(pair, Gathered):
            alike: dict[GatherRecord, list[int]] = {}
            for rank, record in pair.records.items():
                alike.setdefault(record, []).append(rank)
            found = [_rows(pair.dump, pair.stamp, record, own) for record, own in alike.items()]
            shown = [row for rows, _ in found for row in rows]
            left_out = sum(more for _, more in found)
            return exhibit(f"what {pair.call}() gives, stretch by stretch", HEADS, shown, left_out, noun="part")
    return None


def _rows(dump: Dump, stamp: Stamp, record: GatherRecord, ranks: list[int]) -> tuple[list[Row], int]:
    """Return a row for each of the first stretches that are out of place, and how many there are beside these."""
    title, numel = title_of(ranks, dump.files.mesh), math.prod(stamp.shape)
    ids = gathered_ids(dump, stamp, record) if not record.error else None
    if ids is None or len(ids) != numel:
        cells = (Cell(counted(numel, "element")), Cell(""), Cell(_in_words(record, ids), is_wrong=True))
        return [Row(title, cells)], 0
    stretches = _stretches(ids)
    rows = [_row(stamp, ids, *stretch) for stretch in stretches[: MOST_ROWS * 2]]
    return [replace(row, title=title) for row in rows], len(stretches) - len(rows)


def _in_words(record: GatherRecord, ids: NDArray[np.int64] | None) -> str:
    if record.error:
        return f"raised {record.error}"
    return counted(len(ids), "element") if ids is not None else "a tensor of another shape"


def _row(stamp: Stamp, ids: NDArray[np.int64], start: int, stop: int) -> Row:
    own = int(ids[start])
    is_own = 1 <= own <= len(ids)
    got = f"from {index_of(own - 1, stamp.shape)}" if is_own else "no element of the tensor"
    expected = Cell(f"from {index_of(start, stamp.shape)}")
    return Row("", (Cell(counted(stop - start, "element")), expected, Cell(got, is_wrong=True)))


def _stretches(ids: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return where stretches of neighbors that are out of place together begin and end."""
    shift = ids - np.arange(1, len(ids) + 1)
    cuts = [0, *(np.flatnonzero(np.diff(shift)) + 1).tolist(), len(ids)]
    return [(start, stop) for start, stop in pairwise(cuts) if shift[start]]


def beside_definition(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return what the ranks of the first group that is off had before a call, got and should have got."""
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
    expected = Cell(_values_text(wrong.wanted)) if wrong is not None else Cell("")
    return Row(title_of([rank]), (Cell(_values_text(had)), Cell(_values_text(got), wrong is not None), expected))


def _values_text(values: NDArray[np.float64]) -> str:
    return f"[{listed((f'{value:.6g}' for value in values.ravel()[: MOST_CELLS + 1]), MOST_CELLS)}]"
