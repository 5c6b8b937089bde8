"""How often each id is held: as often as the claim has equal copies, neither less nor more.

Counted on a grid whose lines are the ends of all ranges, so that a tensor of any size costs what its cuts cost. What
an absent rank claims is taken as held: its absence is a finding of its own. A plain tensor claims nothing: its ids
must be held somewhere, and all equally often.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import ShardvizError
from shardviz.layout.region import Ranges, indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.check.order.case import Case
    from shardviz.layout.region import Region

MAX_CELLS = 1 << 27


class CountError(ShardvizError):
    """Ids that are too many to be counted one by one."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How often the ids of a tensor are held.

    Attributes:
        copies: How often each should be.
        num_missing: Ids held less often.
        num_duplicated: Ids held more often.
        least: The smallest count.
        most: The largest count.
        first_missing: The element number of the first id held less often; -1 if there is none.
        first_duplicated: The same of the first held more often.
    """

    copies: int
    num_missing: int
    num_duplicated: int
    least: int
    most: int
    first_missing: int
    first_duplicated: int

    @property
    def even(self) -> bool:
        """Whether every id is held as often as it should be."""
        return not self.num_missing and not self.num_duplicated


def count_ids(case: Case) -> Counts:
    """Count how often each id of a case is held.

    Raises:
        CountError: The shards are cut in too many places to count.
    """
    grid = _Grid(case)
    times: Counter[Region] = Counter(case.regions.values())
    if case.claimed is not None:
        times.update(case.claimed.region(coord) for coord in case.absent)
    for region, count in times.items():
        grid.add(region, count)
    for ids in case.ids.values():
        grid.add_ids(ids)
    if case.claimed is None:
        return grid.counts(grid.usual(bool(case.changing_axes)), claimed=False)
    axes = (*case.claimed.replicate_axes, *(axis for axis, _ in case.claimed.partial))
    return grid.counts(math.prod(case.mesh.axis_size(axis) for axis in axes), claimed=True)


class _Grid:
    """The tensor cut at every end of a range; each cell is held as a whole or not at all."""

    def __init__(self, case: Case) -> None:
        self.shape = case.shape
        regions = set(case.regions.values())
        if case.claimed is not None:
            regions |= {case.claimed.region(coord) for coord in case.absent}
        self.lines = [self._cuts(dim, regions, each=bool(case.ids)) for dim in range(len(self.shape))]
        self.cells = tuple(len(line) - 1 for line in self.lines)
        if math.prod(self.cells) > MAX_CELLS:
            raise CountError(
                f"{case.name}: shards cut it into {math.prod(self.cells):,} parts, more than {MAX_CELLS:,}"
            )
        self.held = np.zeros(self.cells, np.int64)

    def _cuts(self, dim: int, regions: set[Region], *, each: bool) -> NDArray[np.int64]:
        size = self.shape[dim]
        if each:
            return np.arange(size + 1)
        ends = {end for region in regions for range_ in region.dims[dim] for end in range_}
        return np.array(sorted(ends | {0, size}), np.int64)

    def add(self, region: Region, times: int) -> None:
        """Count a region that so many ranks hold."""
        if not region.size:
            return
        if not self.cells:
            self.held += times
            return
        cells = [self._cells_of(dim, ranges) for dim, ranges in enumerate(region.dims)]
        np.add.at(self.held, np.ix_(*cells), times)

    def add_ids(self, ids: NDArray[np.int64]) -> None:
        """Count ids one by one; values that are not ids of this tensor do not count."""
        places = ids[ids > 0] - 1
        self.held += np.bincount(places, minlength=self.held.size).reshape(self.cells)

    def _cells_of(self, dim: int, ranges: Ranges) -> NDArray[np.int64]:
        line = self.lines[dim]
        spans = tuple((int(np.searchsorted(line, start)), int(np.searchsorted(line, stop))) for start, stop in ranges)
        return indices(spans)

    def usual(self, is_cut: bool) -> int:
        """Return how often ranks hold an element of a plain tensor on the average.

        So one odd copy of a part is one too many of what it is. Where ranks hold different parts, what is on none of
        them counts apart; if all hold the same part, it is there too often.
        """
        weights = self._weights()
        there = weights[self.held > 0] if is_cut else weights
        return max(math.ceil(int((weights * self.held).sum()) / max(int(there.sum()), 1) - 0.5), 1)

    def _weights(self) -> NDArray[np.int64]:
        """Return how many elements each cell has."""
        weights = np.ones((), np.int64)
        for line in self.lines:
            weights = np.multiply.outer(weights, np.diff(line))
        return weights

    def counts(self, copies: int, *, claimed: bool) -> Counts:
        """Sum up; without a claim every id must be held, and if all are, equally often."""
        weights = self._weights()
        least, most = (int(self.held.min()), int(self.held.max())) if self.held.size else (copies, copies)
        few, many = self.held < (copies if claimed else 1), self.held > copies
        if least < most and not few.any() and not many.any():
            few = self.held < copies
        return Counts(
            copies,
            int(weights[few].sum()),
            int(weights[many].sum()),
            least,
            most,
            self._first_element(few),
            self._first_element(many),
        )

    def _first_element(self, cells: NDArray[np.bool_]) -> int:
        if not cells.any():
            return -1
        cell = np.unravel_index(int(np.argmax(cells)), self.cells) if self.cells else ()
        index = tuple(int(line[at]) for line, at in zip(self.lines, cell, strict=True))
        return int(np.ravel_multi_index(index, self.shape)) if self.shape else 0
