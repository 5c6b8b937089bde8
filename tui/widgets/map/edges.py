"""The indices at the edges of a map: above it those of columns, on its left those of rows; the cursor's in bold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment

from ..grids.grid import BOLD, DIM

if TYPE_CHECKING:
    from rich.style import Style

    from shardviz.picture.text.paint import Frame


CURSOR_LEAST = 4
"""Columns from which on the cursor points at its element from both sides; a smaller one is reversed."""

POINTERS = "»", "«"


def cuts_label(text: str, cursor: tuple[int, int]) -> bool:
    """Whether an edge of the cursor lies on a label, or beside one."""
    low, high = cursor
    return bool((text[low : low + 2] + text[high - 2 : high]).strip(" │├┤┼"))


def pointed_at(text: str, cursor: tuple[int, int]) -> str:
    """Put the cursor's pointers at both ends of its columns, from one up to but not including the other."""
    low, high = cursor
    left, right = POINTERS
    return text[:low] + left + text[low + 1 : high - 1] + right + text[high:]


def row_name(frame: Frame, at: int, row: int, span: tuple[int, int], *, every: bool) -> tuple[str, bool]:
    """Name a row of the screen: a block at its first row, the end on the last line, and all rows where that is asked.

    Args:
        frame: What is drawn.
        at: The row of the tensor that the cursor is on.
        row: The row of the map's cells.
        span: What it covers; start and stop are equal on a line.
        every: Whether all rows are named.

    Returns:
        The name, and whether it is the cursor's.
    """
    start, stop = span
    size = frame.rows.size
    if size == 1:
        return "", False
    if start == stop:
        return (str(size), False) if row == frame.rows.extent - 1 else ("", False)
    is_first = row == frame.rows.cell_of(start)
    begins = is_first and frame.rows.block_of(start)[0] == start
    is_named = (is_first and (every or frame.ids)) or begins
    return (str(start) if is_named else ""), is_named and start <= at < max(stop, start + 1)


def column_names(frame: Frame, at: int, left: int, width: int, gutter: int, base: Style) -> list[Segment]:
    """Name the columns at their first cells, the first and the last before the others; the cursor's is bold."""
    names = _columns(frame, left, width)
    line, bold = [" "] * width, range(0)
    for begin, text, start in sorted(names, key=lambda one: one is not names[0] and one is not names[-1]):
        cells = range(max(begin - 1, 0), min(begin + len(text) + 1, width))
        if all(line[cell] == " " for cell in cells):
            line[begin : begin + len(text)] = list(text)
            bold = range(begin, begin + len(text)) if start == at else bold
    text = "".join(line)
    before, after = " " * gutter + text[: bold.start], text[bold.stop :]
    return [
        Segment(before, base + DIM),
        Segment(text[bold.start : bold.stop], base + BOLD),
        Segment(after, base + DIM),
    ]


def _columns(frame: Frame, left: int, width: int) -> list[tuple[int, str, int]]:
    """Return where the names of columns begin, the names, and the columns; of a line there are none."""
    if frame.cols.size == 1:
        return []
    found, before = [], None
    for x, span in enumerate(map(tuple, frame.cols.spans(left, width).tolist())):
        is_end = span[0] == span[1] == frame.cols.size
        if span != before and (is_end or (span[0] < span[1] and _is_named(frame, span[0], before is None))):
            text = str(span[0])
            found.append((max(min(x, width - len(text)), 0), text, span[0]))
        before = span
    return found


def _is_named(frame: Frame, start: int, is_first: bool) -> bool:
    return is_first or frame.ids or not frame.cols.lines or frame.cols.block_of(start)[0] == start
