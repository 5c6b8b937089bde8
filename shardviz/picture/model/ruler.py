"""Convert a dim's indices to screen cells and back: scale, zoom, and lines between blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        cells: Cells per index; above 1 only if `each` is 1.
        lines: Whether there is a cell for a line before, between and behind the blocks.
        stretched: Cells of each block, if they are as many as the room has and cover spans of almost one size; then
            `each` is about that.
        whole: Whether all cells of a block cover all of it: it stands for several parts, and no cell for some of them.
    """

    edges: Indices
    each: int = 1
    cells: int = 1
    lines: bool = False
    stretched: tuple[int, ...] = ()
    whole: bool = False

    @classmethod
    def scaled(cls, edges: Indices, each: int, cells: int = 1) -> Ruler:
        """Return a ruler at a fixed scale: lines only between long blocks, tiny blocks merged."""
        blocks, size = len(edges) - 1, int(edges[-1])
        if blocks * each > 2 * size * cells:
            return cls(np.array([0, size], np.int64), each, cells)
        plain = cls(edges, each, cells)
        return cls(edges, each, cells, lines=True) if plain.extent >= 2 * blocks else plain

    @classmethod
    def fitted(
        cls, edges: Indices, room: int, most: int = 1, outer: Sequence[Indices] = (), least: tuple[int, int] = (1, 2)
    ) -> Ruler:
        """Return the largest ruler that fits into `room` cells; its blocks are whole parts.

        Args:
            edges: Where parts begin.
            room: Cells to use at most.
            most: Cells per index at most.
            outer: The edges of the blocks that parts are in, coarsest first: the finest that fit are drawn if the
                parts themselves do not, each cut into as many equal groups of the next as fit.
            least: Cells that a part needs to be drawn by itself, and that a block of many needs.
        """
        size = int(edges[-1])
        if not size:
            return cls(edges)
        if (len(edges) - 1) * least[0] <= room:
            return cls._filled(edges, room, most, least[0])
        levels = [np.array([0, size], np.int64), *(one for one in outer if 2 < len(one) < len(edges)), edges]
        fits = [at for at, one in enumerate(levels) if at == 0 or (len(one) - 1) * least[1] < room]
        dense = [at for at, one in enumerate(levels) if at and len(one) - 1 <= room and least[0] == 1]
        if fits == [0] and dense:
            return replace(cls._filled(levels[dense[-1]], room, most, least[0]), whole=True)
        at = min(fits[-1], len(levels) - 2)
        groups = _grouped(levels[at], levels[at + 1], (room - 1) // least[1])
        return replace(cls._filled(groups, room, most, least[0]), whole=True)

    @classmethod
    def _filled(cls, edges: Indices, room: int, most: int, least: int) -> Ruler:
        """Return a ruler to scale, with lines if these leave the blocks what they need."""
        lengths, size = np.diff(edges), int(edges[-1])
        for lines in (len(edges), 0):
            counts = _to_scale(lengths, room - lines, most)
            cells = int(counts.sum())
            if cells + lines <= room and (not lines or cells >= min(least * len(lengths), size)):
                return cls(edges, -(-size // cells), 1, bool(lines), tuple(counts.tolist()))
        return cls(edges, int(lengths.max()))

    @property
    def size(self) -> int:
        """Number of indices."""
        return int(self.edges[-1])

    @cached_property
    def _counts(self) -> Indices:
        """Cells of each block, without lines."""
        if self.stretched:
            return np.array(self.stretched, np.int64)
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
        """Return the indices that cells cover as `(start, stop)`; on a line both are its edge.

        Args:
            first: The first cell wanted.
            count: Cells wanted; those beyond the extent are left out.
        """
        at = np.arange(first, min(first + count, self.extent), dtype=np.int64)
        block = np.searchsorted(self._starts, at, side="right") - 1
        ahead = at - self._starts[block]
        on_line = (block < 0) | (ahead >= self._counts[block])
        start, stop = self._covered(block, ahead)
        edge = self.edges[block + 1]
        return np.stack([np.where(on_line, edge, start), np.where(on_line, edge, stop)], axis=-1)

    def _covered(self, block: Indices, ahead: Indices) -> tuple[Indices, Indices]:
        """Return what cells cover, given their blocks and the cells of these before them."""
        begin, end = self.edges[block], self.edges[block + 1]
        if self.whole:
            return begin, end
        if self.stretched:
            length, count = end - begin, self._counts[block]
            first: Indices = begin + np.floor_divide(ahead * length, count)
            after: Indices = begin + np.floor_divide((ahead + 1) * length, count)
            return first, np.maximum(after, first + 1)
        start = begin + np.floor_divide(ahead, self.cells) * self.each
        return start, np.minimum(start + self.each, end)

    def cell_of(self, index: int) -> int:
        """Return the first cell that shows an index."""
        block = int(np.searchsorted(self.edges, index, side="right")) - 1
        ahead = index - int(self.edges[block])
        if self.whole:
            return int(self._starts[block])
        if self.stretched:
            length, count = int(self.edges[block + 1] - self.edges[block]), self.stretched[block]
            first = -(-ahead * count // length) if count >= length else ((ahead + 1) * count - 1) // length
            return int(self._starts[block]) + first
        return int(self._starts[block]) + ahead // self.each * self.cells

    def cells_of(self, index: int) -> int:
        """Return how many cells show an index."""
        block = int(np.searchsorted(self.edges, index, side="right")) - 1
        if self.whole:
            return int(self._counts[block])
        if not self.stretched:
            return self.cells
        end, count = int(self.edges[block + 1]), self.stretched[block]
        after = self.cell_of(index + 1) if index + 1 < end else int(self._starts[block]) + count
        return max(after - self.cell_of(index), 1)

    def block_of(self, index: int) -> tuple[int, int]:
        """Return the first index of the block that an index is in, and one past its last."""
        block = int(np.searchsorted(self.edges, index, side="right")) - 1
        return int(self.edges[block]), int(self.edges[block + 1])


def _to_scale(lengths: Indices, room: int, most: int) -> Indices:
    """Give blocks cells in proportion to their lengths, at least one each."""
    size = int(lengths.sum())
    for total in range(room + len(lengths), 0, -1):
        counts: Indices = np.clip((lengths * total + size // 2) // size, 1, lengths * most)
        if counts.sum() <= room:
            return counts
    return np.ones(len(lengths), np.int64)


def _grouped(blocks: Indices, parts: Indices, most: int) -> Indices:
    """Cut each block into groups of equally many parts, at most `most` groups in all."""
    inside = [parts[(parts >= start) & (parts <= stop)] for start, stop in pairwise(blocks.tolist())]
    largest = max(map(len, inside)) - 1
    groups = max(most // len(inside), 1)
    least = -(-largest // groups)
    each = next((count for count in range(least, min(2 * least, largest)) if not largest % count), least)
    return np.unique(np.concatenate([blocks, *(found[::each] for found in inside)]))
