"""Lines between a panel's two sides as text, from where each part should be to where it is.

Each line leaves the claimed side on a part's last row, runs down or up in its own lane, and reaches the held side on
the part's first row. If two lines would overlap, none is drawn: marks and the list of ranks show it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import ranks_of
from shardviz.picture.model.palette import line_style
from shardviz.picture.model.pieces import pieces
from shardviz.picture.text.boxes import CellBlocks
from shardviz.picture.text.terminal import line
from shardviz.text import INSIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.picture.model.drawing import Panel
    from shardviz.picture.model.palette import Coloring
    from shardviz.picture.model.pieces import Stretch
    from shardviz.picture.text.panels import BoxSizes
    from shardviz.picture.text.terminal import Glyphs

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
            _row(panel, sizes, due, last=True), _row(panel, sizes, has), line_style(coloring.color(ranks_of(mask)[0]))
        )
        for mask, due, has in pieces(panel)
        if due != has
    ]


def _row(panel: Panel, sizes: BoxSizes, stretch: Stretch, *, last: bool = False) -> int:
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
