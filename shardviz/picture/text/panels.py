"""A drawing as text: boxes to scale, the ranks in them, indices along their sides, lines between both sides.

A picture is a grid of cells with one character each. Every cell shows a block or a line between blocks. A line is
drawn only if the blocks on its two sides differ, so equal neighbors become one box. The lines of bands leave the
claimed side on a part's last row, run down or up in lanes of their own, and reach the held side on the part's first
row. If two would overlap, none is drawn: marks and the list of ranks show it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from shardviz.picture.model.drawing import column_titles, pieces, row_stretches
from shardviz.picture.model.holders import rank_array, ranks_of
from shardviz.picture.model.mesh import block_label, ranks_label
from shardviz.picture.model.palette import style_of
from shardviz.picture.text.terminal import BAD, DIM, line
from shardviz.text import INSIDE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from rich.text import Text

    from shardviz.picture.model.drawing import Block, Grid, Panel, Span, Stretch
    from shardviz.picture.model.palette import Coloring
    from shardviz.picture.text.terminal import Glyphs

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


MOST_LINES = 24
"""Lines that a panel's blocks are stretched to at most to be to scale."""

MOST_TALL = 16
"""Lines up to which they are doubled if lines between the sides need room."""

MOST_RULED = 12
"""With more rows of blocks than this, no lines are drawn between them."""

MIN_CELL = 6
MAX_CELL = 28


@dataclass(frozen=True, slots=True)
class BoxSizes:
    """The sizes of a panel's boxes, shared by both sides, which keeps them aligned.

    Attributes:
        heights: Lines of each row of blocks.
        widths: Columns of each column of blocks, without the lines between them.
        gutter: Columns for the indices of rows.
        ruled: Whether a line may be drawn between rows of blocks.
    """

    heights: tuple[int, ...]
    widths: tuple[int, ...]
    gutter: int
    ruled: bool


def sizes_for(panel: Panel, coloring: Coloring, width: int, glyphs: Glyphs, *, tall: bool = False) -> BoxSizes:
    """Choose the sizes of a panel's boxes, to scale within `width` columns, for both sides.

    They exceed `width` if even the smallest boxes don't fit.

    Args:
        width: Columns for one side.
        tall: Whether each row gets twice its lines, if these are few.
    """
    grids = [grid for grid in (panel.claimed, panel.held) if grid is not None]
    gutter = max(len(title) for grid in grids for title in _row_titles(panel.rows, grid, glyphs))
    inner = width - gutter - len(panel.cols) - 2
    most = max(MIN_CELL, min(inner // len(panel.cols), MAX_CELL))
    mark = len(glyphs.wrong) + 1 if any(map(any, panel.wrong)) else 0
    room = most - 2 - mark
    need = max(max(map(len, _labels(panel, coloring, room))) + 2 + mark, MIN_CELL)
    titles = [len(span.title(glyphs.more)) for span in panel.cols]
    smallest = [max(need, title + 2) if sum(titles) + 2 * len(titles) <= inner else need for title in titles]
    ruled = len(panel.rows) <= MOST_RULED
    heights = _heights(panel.rows)
    if tall and sum(heights) <= MOST_TALL // 2:
        heights = tuple(2 * height for height in heights)
    return BoxSizes(heights, _widths(panel.cols, smallest, inner), gutter, ruled)


def side_lines(
    panel: Panel, grid: Grid, sizes: BoxSizes, coloring: Coloring, glyphs: Glyphs, *, marked: bool
) -> list[Text]:
    """Draw one side of a panel.

    Args:
        marked: Whether blocks that differ from the other side carry the glyph.
    """
    boxes, styles, first_lines = _paint_side(panel, grid, sizes, coloring, glyphs, marked=marked)
    titles = dict(zip(first_lines, _row_titles(panel.rows, grid, glyphs), strict=True))
    lines = [_column_titles(panel, sizes, glyphs)] if len(panel.cols) > 1 or len(panel.cols[0]) > 1 else []
    for at, (chars, row) in enumerate(zip(boxes.chars.tolist(), styles, strict=True)):
        parts = [("".join(chars[start:stop]), row[start]) for start, stop in runs(row)]
        lines.append(line((titles.get(at, "").rjust(sizes.gutter), DIM), " ", *parts))
    return lines


def _paint_side(
    panel: Panel, grid: Grid, sizes: BoxSizes, coloring: Coloring, glyphs: Glyphs, *, marked: bool
) -> tuple[Boxes, list[list[str]], list[int]]:
    """Paint one side: boxes with ranks in them, each cell's style, and each row's first line."""
    marks = panel.wrong if marked else tuple((False,) * len(row) for row in grid)
    cells = [list(zip(row, of_row, strict=True)) for row, of_row in zip(grid, marks, strict=True)]
    numbers: dict[tuple[Block, bool], int] = {}
    codes = [[numbers.setdefault(cell, len(numbers)) for cell in row] for row in cells]
    down, across = CellBlocks.of_sizes(sizes.heights, ruled=sizes.ruled), CellBlocks.of_sizes(sizes.widths)
    boxes = paint_boxes(np.array(codes), down, across, glyphs.corners)
    fills = [
        style_of("rank", coloring.color_of(rank_array(block.ranks))) if block.ranks else BAD for block, _ in numbers
    ]
    styles = [[DIM if code == LINE else fills[code] for code in row] for row in boxes.codes.tolist()]
    first_lines = [down.first_of(row) for row in range(len(grid))]
    lefts = [across.first_of(col) for col in range(len(grid[0]))]
    for row, at in enumerate(first_lines):
        for start, stop in runs(cells[row]):
            _, differs = cells[row][start]
            if not row or cells[row - 1][start:stop] != cells[row][start:stop]:
                width = sum(sizes.widths[start:stop]) + stop - start - 1
                sign = glyphs.wrong if differs else ""
                boxes.write_centred(at, lefts[start], width, block_label(grid[row][start], coloring, width - 2, sign))
    return boxes, styles, first_lines


def _labels(panel: Panel, coloring: Coloring, room: int) -> list[str]:
    blocks = {block for grid in (panel.claimed, panel.held) if grid for row in grid for block in row}
    return [ranks_label(block.ranks, coloring, room, many=block.is_mixed) for block in blocks]


def _heights(rows: Sequence[Span]) -> tuple[int, ...]:
    """Give each row lines in proportion to its size; parts that are only counted get one."""
    unit = float(min((len(span) for span in rows if span.parts == 1), default=1))
    while True:
        heights = tuple(max(1, round(len(span) / unit)) if span.parts == 1 else 1 for span in rows)
        if sum(heights) <= max(MOST_LINES, len(rows)):
            return heights
        unit *= 1.25


def _widths(cols: Sequence[Span], smallest: Sequence[int], inner: int) -> tuple[int, ...]:
    """Give each column room in proportion to its size, never less than it needs."""
    if len(cols) == 1:
        return (max(smallest[0], min(16, inner)),)
    exact = [len(span) for span in cols if span.parts == 1]
    unit = min(exact, default=1) / max(smallest)
    while True:
        widths = tuple(
            max(least, round(len(span) / unit)) if span.parts == 1 else least
            for span, least in zip(cols, smallest, strict=True)
        )
        if sum(widths) <= inner or widths == tuple(smallest):
            return widths
        unit *= 1.1


def _row_titles(rows: Sequence[Span], grid: Grid, glyphs: Glyphs) -> list[str]:
    """Name a side's rows; neighbors with equal ranks are named once, at the first row."""
    if len(rows) == 1 and len(rows[0]) == 1:
        return [" "]
    titles = [""] * len(rows)
    for start, _, title in row_stretches(rows, grid, glyphs.more):
        titles[start] = title
    return titles


def _column_titles(panel: Panel, sizes: BoxSizes, glyphs: Glyphs) -> Text:
    titles = column_titles(panel.cols, sizes.widths, glyphs.more)
    if titles == [span.title(glyphs.more) for span in panel.cols]:
        cells = [title.center(width) for title, width in zip(titles, sizes.widths, strict=True)]
    else:
        cells = [title[:width].ljust(width) for title, width in zip(titles, sizes.widths, strict=True)]
    return line((" " * (sizes.gutter + 2) + " ".join(cells), DIM))


MOST_LANES = 8
"""With more lines than this side by side none could be followed."""

LANE = 2
"""Columns of a lane."""

UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
"""The arms of a line's characters, as `Glyphs.corners` counts them."""

CROSSING = UP | DOWN | LEFT | RIGHT


@dataclass(frozen=True, slots=True)
class BandLine:
    """A line from where a part should be to where it is.

    Attributes:
        begin: The row of the screen that it leaves, counted from the first of the boxes.
        end: The row that it comes to.
        style: Its color.
    """

    begin: int
    end: int
    style: str


def band_lines(panel: Panel, sizes: BoxSizes, coloring: Coloring, glyphs: Glyphs) -> list[Text]:
    """Draw the lines, one row of text a row of boxes; empty if there are none or too many."""
    moves = _moves(panel, sizes, coloring)
    order = _lanes(moves) if 0 < len(moves) <= MOST_LANES else None
    if order is None:
        return []
    height = len(CellBlocks.of_sizes(sizes.heights, ruled=sizes.ruled).before)
    width = LANE * len(order) + 2
    arms = [[0] * width for _ in range(height)]
    styles = [[""] * width for _ in range(height)]
    for lane, move in enumerate(order):
        for row, col, arm in _line_cells(move, LANE * lane + 1, width):
            arms[row][col] |= arm
            styles[row][col] = move.style
    ends, corners = {move.end for move in order}, glyphs.corners
    if corners[CROSSING] == corners[LEFT | DOWN]:  # in ASCII, where a crossing would look like two corners
        corners = corners[:CROSSING] + corners[UP | DOWN]
    return [
        line(*((corners[arm], style) for arm, style in zip(*row, strict=True)), INSIDE if at in ends else " ")
        for at, row in enumerate(zip(arms, styles, strict=True))
    ]


def _moves(panel: Panel, sizes: BoxSizes, coloring: Coloring) -> list[BandLine]:
    """Return the lines of the parts that moved."""
    return [
        BandLine(
            _screen_row(panel, sizes, due, last=True),
            _screen_row(panel, sizes, has),
            style_of("line", coloring.color(ranks_of(mask)[0])),
        )
        for mask, due, has in pieces(panel)
        if due != has
    ]


def _screen_row(panel: Panel, sizes: BoxSizes, stretch: Stretch, *, last: bool = False) -> int:
    """Return the first or the last row of the screen that a stretch of the drawn dim takes."""
    cut = CellBlocks.of_sizes(sizes.heights, ruled=sizes.ruled)
    starts = [span.start for span in panel.rows]
    block = max(bisect_right(starts, stretch[1] - 1e-6 if last else stretch[0]) - 1, 0)
    return cut.first_of(block) + (sizes.heights[block] - 1 if last else 0)


def _lanes(moves: Sequence[BandLine]) -> list[BandLine] | None:
    """Return the lines by lane, from the left; None if two would lie on each other in any order.

    On a row that one leaves and another comes to, the first must turn before the second does.
    """
    if len({move.begin for move in moves}) < len(moves) or len({move.end for move in moves}) < len(moves):
        return None
    leaving = {move.begin: move for move in moves if move.begin != move.end}
    before = {move: [leaving[move.end]] if move.end in leaving else [] for move in moves}
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError:
        return None


def _line_cells(move: BandLine, lane: int, width: int) -> list[tuple[int, int, int]]:
    """Return the row, the column and the arms of each character of a line."""
    if move.begin == move.end:
        return [(move.begin, col, LEFT | RIGHT) for col in range(width)]
    down = move.end > move.begin
    low, high = sorted((move.begin, move.end))
    return [
        *((move.begin, col, LEFT | RIGHT) for col in range(lane)),
        (move.begin, lane, LEFT | (DOWN if down else UP)),
        *((row, lane, UP | DOWN) for row in range(low + 1, high)),
        (move.end, lane, RIGHT | (UP if down else DOWN)),
        *((move.end, col, LEFT | RIGHT) for col in range(lane + 1, width)),
    ]
