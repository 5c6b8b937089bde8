"""The indices at the edges of a map: above it those of columns, on its left those of rows; the cursor's in bold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment

from ..grids.grid import BOLD, DIM

if TYPE_CHECKING:
    from rich.style import Style

    from shardviz.picture.text.paint import Frame


CURSOR_LEAST = 4
"""Columns from which on the cursor is a frame around its element; a smaller one is reversed."""

OUTLINES = {
    (True, True): ("[", " ", "]"),
    (True, False): ("┏", "━", "┓"),
    (False, False): ("┃", " ", "┃"),
    (False, True): ("┗", "━", "┛"),
}
"""The left edge, the inside and the right edge of the cursor's lines, by whether it is the first and the last one."""


def cuts_label(text: str, cursor: tuple[int, int]) -> bool:
    """Whether an edge of the cursor's frame lies on a label, or between two of its words."""
    low, high = cursor
    beside = text[max(low - 1, 0) : low + 1] + text[high - 1 : high + 1]
    return bool(text[low:high].strip()) and bool(beside.strip(" │├┤┼"))


def outlined(text: str, cursor: tuple[int, int], *, first: bool, last: bool) -> str:
    """Draw the cursor's frame over a line of the map; the label inside stays readable.

    Args:
        text: The characters of the line.
        cursor: The columns that the cursor covers, from one up to but not including the other.
        first: Whether this is the cursor's first line.
        last: Whether this is its last line.
    """
    low, high = cursor
    left, inside, right = OUTLINES[first, last]
    within = text[low + 1 : high - 1]
    return text[:low] + left + (within.replace(" ", inside) if inside != " " else within) + right + text[high:]


def row_name(frame: Frame, at: int, row: int, span: tuple[int, int], *, ruled: bool, every: bool) -> tuple[str, bool]:
    """Name a row of the screen: where a line is drawn, and all rows where there are none.

    Args:
        frame: What is drawn.
        at: The row of the tensor that the cursor is on.
        row: The row of the map's cells.
        span: What it covers; start and stop are equal on a line.
        ruled: Whether a line is drawn there.
        every: Whether all rows are named.

    Returns:
        The name, and whether it is the cursor's.
    """
    start, stop = span
    begins = frame.rows.lines and at in frame.rows.edges
    here = (start == stop == at and ruled) if begins else row == frame.rows.cell_of(at)
    is_first = start < stop and row == frame.rows.cell_of(start)
    named = ruled if start == stop else is_first and (every or frame.ids or not frame.rows.lines)
    return (str(at) if here else str(start) if named else ""), here


def column_names(frame: Frame, at: int, left: int, width: int, gutter: int, base: Style) -> list[Segment]:
    """Name the columns at their first cells, as many as there is room for; the cursor's comes before others."""
    line = [" "] * width
    own = frame.cols.cell_of(at) - left
    name = str(at)
    own = min(own, width - len(name)) if own < width else own
    shown = 0 <= own <= width - len(name)
    if shown:
        line[own : own + len(name)] = list(name)
    taken = range(own - 1, own + len(name) + 1) if shown else range(0)
    free, before = 0, None
    for x, span in enumerate(map(tuple, frame.cols.spans(left, width).tolist())):
        first = span != before and (span[0] == span[1] or frame.ids or not frame.cols.lines or before is None)
        text = str(span[0])
        begin = min(x, width - len(text))
        cells = range(begin, begin + len(text))
        if first and begin >= free and (cells.stop <= taken.start or begin >= taken.stop):
            line[begin : cells.stop] = list(text)
            free = cells.stop + 1
        before = span
    text = " " * gutter + "".join(line)
    begin, end = (gutter + own, gutter + own + len(name)) if shown else (0, 0)
    return [Segment(text[:begin], base + DIM), Segment(text[begin:end], base + BOLD), Segment(text[end:], base + DIM)]
