"""From indices of a dim to cells of a screen and back: scale, zoom, and the lines between blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Ruler:
    """One dim on the screen.

    Where every block between two edges has cells of its own, no cell shows two of them, and a line may be drawn between
    blocks; where there are more blocks than room, cells take equal spans and may show several.

    Attributes:
        edges: Where blocks begin, rising, with 0 first and the dim's size last.
        each: Indices per cell, at least 1.
        cells: Cells per index; above 1 only where `each` is 1.
        lines: Whether there is a cell for a line before, between and behind the blocks.
    """

    edges: Indices
    each: int = 1
    cells: int = 1
    lines: bool = False

    @classmethod
    def scaled(cls, edges: Indices, each: int, cells: int = 1) -> Ruler:
        """Return a ruler at one scale: with lines where blocks are long enough, without blocks where they are tiny."""
        blocks, size = len(edges) - 1, int(edges[-1])
        if blocks * each > 2 * size * cells:
            return cls(np.array([0, size], np.int64), each, cells)
        plain = cls(edges, each, cells)
        return cls(edges, each, cells, lines=True) if plain.extent >= 2 * blocks else plain

    @classmethod
    def fitted(cls, edges: Indices, room: int, most: int = 1) -> Ruler:
        """Return the largest ruler that fits into `room` cells, with at most `most` cells per index."""
        blocks, size = len(edges) - 1, int(edges[-1])
        if blocks > room:
            return cls(np.array([0, size], np.int64), -(-size // room))
        if size <= room:
            cells = max((c for c in range(1, most + 1) if size * c + blocks + 1 <= room), default=0)
            return cls(edges, 1, cells, lines=True) if cells else cls(edges)
        longest = int(np.diff(edges).max(initial=1))
        for parts in range(min(room, longest), 0, -1):
            ruler = cls.scaled(edges, -(-longest // parts))
            if ruler.extent <= room:
                return ruler
        return cls(edges, longest)

    @property
    def size(self) -> int:
        """Number of indices."""
        return int(self.edges[-1])

    @cached_property
    def _counts(self) -> Indices:
        """Cells of each block, without lines."""
        return -(-np.diff(self.edges) // self.each) * self.cells

    @cached_property
    def _starts(self) -> Indices:
        """The first cell of each block; its line comes before it."""
        before = np.concatenate([[0], np.cumsum(self._counts)])[:-1]
        return before + np.arange(1, len(before) + 1) if self.lines else before

    @cached_property
    def extent(self) -> int:
        """Number of cells."""
        return int(self._counts.sum()) + (len(self.edges) if self.lines else 0) if self.size else 0

    def spans(self, first: int, count: int) -> Indices:
        """Return the indices that cells cover, as `(start, stop)` each; on a line both are the edge that it marks.

        Args:
            first: The first cell wanted.
            count: Cells wanted; those beyond the extent are left out.
        """
        at = np.arange(first, min(first + count, self.extent), dtype=np.int64)
        block = np.searchsorted(self._starts, at, side="right") - 1
        ahead = at - self._starts[block]
        on_line = (block < 0) | (ahead >= self._counts[block])
        start = self.edges[block] + ahead // self.cells * self.each
        stop = np.minimum(start + self.each, self.edges[block + 1])
        edge = self.edges[block + 1]
        return np.stack([np.where(on_line, edge, start), np.where(on_line, edge, stop)], axis=-1)

    def cell_of(self, index: int) -> int:
        """Return the first cell that shows an index."""
        block = int(np.searchsorted(self.edges, index, side="right")) - 1
        return int(self._starts[block] + (index - self.edges[block]) // self.each * self.cells)

    def block_of(self, index: int) -> tuple[int, int]:
        """Return the first index of the block that an index is in, and one past its last."""
        block = int(np.searchsorted(self.edges, index, side="right")) - 1
        return int(self.edges[block]), int(self.edges[block + 1])
