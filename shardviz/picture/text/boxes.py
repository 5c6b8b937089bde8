"""Paint boxes for printed pages and for the TUI's map: lines between blocks, labels in them.

A picture is a grid of cells with one character each. Every cell shows a block or a line between blocks. A line is
drawn only if the blocks on its two sides differ, so equal neighbors become one box.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Indices = NDArray[np.int64]
    Chars = NDArray[np.str_]

OUTSIDE = -1
LINE = -2
CORNERS = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"
"""Box-drawing characters by their arms: 1 up, 2 down, 4 left, 8 right."""


@dataclass(frozen=True, slots=True)
class CellBlocks:
    """Which blocks of one dim the cells of the screen show, or lie between.

    Attributes:
        before: For each cell the block at or before it, counted from 1; 0 is outside.
        after: The block at or behind it; the same as `before` unless the cell is a line.
    """

    before: Indices
    after: Indices

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], *, ruled: bool = True) -> CellBlocks:
        """Give every block its cells, with lines at both ends, and between blocks if `ruled`."""
        last = len(sizes)
        before, after = [0], [1]
        for block, size in enumerate(sizes, 1):
            inside = [block] * size
            before += [*inside, block] if ruled or block == last else inside
            after += [*inside, (block + 1) % (last + 1)] if ruled or block == last else inside
        return cls(np.array(before), np.array(after))

    @property
    def is_inside(self) -> NDArray[np.bool_]:
        """Which cells show a block, and not a line."""
        same: NDArray[np.bool_] = self.before == self.after
        return same

    def first_of(self, block: int) -> int:
        """Return the first cell that shows a block, counted from 0."""
        return int(np.flatnonzero(self.is_inside & (self.before == block + 1))[0])


@dataclass(frozen=True, slots=True)
class Boxes:
    """A painted picture.

    Attributes:
        chars: The character of each cell; none of them is wide: names of axes are ASCII.
        codes: What each cell shows: the number of a block, `LINE` or `OUTSIDE`.
    """

    chars: Chars
    codes: Indices

    def write(self, row: int, col: int, text: str) -> None:
        """Write text into a row of cells, starting at `col` and clipped at the picture's edges."""
        low, high = max(col, 0), min(col + len(text), self.chars.shape[1])
        if low < high:
            self.chars[row, low:high] = list(text[low - col : high - col])

    def write_centred(self, row: int, col: int, room: int, text: str) -> None:
        """Write text into the middle of some cells of a row."""
        if text:
            self.write(row, col + max(room - len(text), 0) // 2, text)


def paint_boxes(blocks: Indices, down: CellBlocks, across: CellBlocks, corners: str = CORNERS) -> Boxes:
    """Draw the lines around blocks.

    Args:
        blocks: The number of each block, rows by columns; equal neighbors become one box.
        down: The cells of the screen downwards.
        across: The cells to the right.
        corners: The characters of lines, by their arms.
    """
    padded = np.full((blocks.shape[0] + 1, blocks.shape[1] + 1), OUTSIDE)
    padded[1:, 1:] = blocks
    up_left, up_right, down_left, down_right = (
        padded[rows[:, None], cols] for rows in (down.before, down.after) for cols in (across.before, across.after)
    )
    up, below = up_left != up_right, down_left != down_right
    left, right = up_left != down_left, up_right != down_right
    arms = up + 2 * below + 4 * left + 8 * right
    return Boxes(np.array(list(corners))[arms], np.where(arms > 0, LINE, down_right))


def runs(row: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Return neighbors that are equal, as (first, one past the last)."""
    start = 0
    for _, run in groupby(row):
        stop = start + len(tuple(run))
        yield start, stop
        start = stop
