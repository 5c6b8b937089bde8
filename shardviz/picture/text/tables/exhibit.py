"""An exhibit as text: its table within the terminal's width, the cells that are wrong in colour and with a glyph."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from shardviz.picture.exhibits.steps import LEVELS
from shardviz.picture.text.tables.table import padded, widest
from shardviz.picture.text.terminal import ASCII, BAD, DIM, line
from shardviz.text import printable

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.picture.exhibits.exhibit import Cell, Exhibit
    from shardviz.picture.text.terminal import Glyphs, Terminal

INDENT = "   "
GAP = 2

_IN_ASCII = str.maketrans(LEVELS, ".12345678")


def exhibit_lines(exhibit: Exhibit, terminal: Terminal) -> list[Text]:
    """Return an exhibit's caption and table; columns that do not fit are left out from the right."""
    titles = [printable(exhibit.heads[0]), *(printable(row.title) for row in exhibit.rows)]
    columns = _columns(exhibit, terminal.glyphs)
    widths = [widest(titles), *map(widest, columns)]
    kept = _fitting(widths, terminal.width - len(INDENT))
    lines = [line("  ", (printable(exhibit.caption), "bold"))]
    for at, title in enumerate(titles):
        styles = [BAD if cell.is_wrong else "" for cell in exhibit.rows[at - 1].cells] if at else [DIM] * len(columns)
        cells = zip(columns, widths[1:kept], styles, strict=False)
        parts = ((" " * GAP + padded(column[at], width), style) for column, width, style in cells)
        lines.append(line(INDENT, (padded(title, widths[0]), "" if at else DIM), *parts))
    if exhibit.left_out:
        more = line((f"{INDENT}{terminal.glyphs.more} {exhibit.left_out:,} more", DIM))
        lines.insert(2 + exhibit.shown, more)
    return lines


def _columns(exhibit: Exhibit, glyphs: Glyphs) -> list[list[str]]:
    """Return each column after the first as texts, its head first."""
    rows = [[cell_text(cell, glyphs) for cell in row.cells] for row in exhibit.rows]
    return [list(column) for column in zip_longest(map(printable, exhibit.heads[1:]), *rows, fillvalue="")]


def cell_text(cell: Cell, glyphs: Glyphs) -> str:
    """Write a cell, behind its glyph if it is wrong."""
    text = printable(cell.text)
    text = text.translate(_IN_ASCII) if glyphs == ASCII else text
    sign: str = getattr(glyphs, cell.sign)
    return f"{sign}{text}" if cell.is_wrong else text


def _fitting(widths: list[int], room: int) -> int:
    """Return how many columns fit, at least two."""
    used = 0
    for count, width in enumerate(widths):
        used += width + GAP * bool(count)
        if used > room and count >= 2:
            return count
    return len(widths)
