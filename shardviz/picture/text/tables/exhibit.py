"""An exhibit as text: its table within the terminal's width, the cells that are wrong in colour and with a glyph."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.picture.exhibits.steps import LEVELS
from shardviz.picture.text.tables.table import padded, widest
from shardviz.picture.text.terminal import ASCII, BAD, DIM, GOOD, line, wrapped
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.picture.exhibits.exhibit import Cell, Exhibit
    from shardviz.picture.text.terminal import Glyphs, Terminal

INDENT = "   "
GAP = 2

_IN_ASCII = str.maketrans(dict(zip(LEVELS, ".12345678", strict=True)) | {"…": ASCII.more})
_NUMBER = re.compile(r"-?(?:\d+|inf|nan)(?=(?:[./e][-+.e\d]*)?$)")
"""A number up to its decimal point, or to the line of a fraction."""


def exhibit_lines(exhibit: Exhibit, terminal: Terminal) -> list[Text]:
    """Return an exhibit's caption and table; columns that do not fit are left out from the right, where `…` says so."""
    titles = [_spelled(title, terminal.glyphs) for title in (exhibit.heads[0], *(row.title for row in exhibit.rows))]
    columns = columns_of(exhibit, terminal.glyphs)
    widths = [widest(titles), *map(widest, columns)]
    room = terminal.width - len(INDENT)
    more = (" " * GAP + terminal.glyphs.more, DIM) if _fitting(widths, room) < len(widths) else ("", "")
    kept = _fitting(widths, room - len(more[0]))
    lines = wrapped(printable(exhibit.caption), terminal.width, line("  "), 2)
    for caption in lines:
        caption.stylize("bold", 2)
    lines.append(line(_line(titles, columns, widths[:kept], 0, []), more))
    for at, row in enumerate(exhibit.rows, 1):
        lines += [line("")] if row.is_apart and at > 1 else []
        lines.append(_line(titles, columns, widths[:kept], at, row.cells))
    if exhibit.left_out:
        left_out = line((f"{INDENT}{terminal.glyphs.more} {exhibit.more}", DIM))
        lines.insert(len(lines) - exhibit.sums_up, left_out)
    return lines


def _line(titles: list[str], columns: list[list[str]], widths: list[int], at: int, cells: Sequence[Cell]) -> Text:
    """Write the heads of the columns, which come first, or one of the rows below them."""
    styles = [BAD if cell.is_wrong else GOOD if cell.is_right else "" for cell in cells] or [DIM] * len(columns)
    texts = zip(columns, widths[1:], [*styles, *[""] * len(columns)], strict=False)
    parts = ((" " * GAP + padded(column[at], width), style) for column, width, style in texts)
    return line(INDENT, (padded(titles[at], widths[0]), "" if at else DIM), *parts)


def columns_of(exhibit: Exhibit, glyphs: Glyphs) -> list[list[str]]:
    """Return each column after the first as texts, its head first, numbers with their decimal points in line."""
    return [
        _column(head, [row.cells[at] if at < len(row.cells) else None for row in exhibit.rows], glyphs)
        for at, head in enumerate(exhibit.heads[1:])
    ]


def _column(head: str, cells: Sequence[Cell | None], glyphs: Glyphs) -> list[str]:
    """Write the cells of a column; beside those that carry a glyph, the others are set in by as much."""
    texts = _in_line([_spelled(cell.text, glyphs) if cell else "" for cell in cells])
    signs = [_sign(cell, glyphs) for cell in cells]
    if not any(signs):
        return [_spelled(head, glyphs), *texts]
    marked = (f"{sign or ' '} {text}" if text else "" for sign, text in zip(signs, texts, strict=True))
    return [f"  {_spelled(head, glyphs)}", *marked]


def _sign(cell: Cell | None, glyphs: Glyphs) -> str:
    if cell is None:
        return ""
    return glyphs.wrong if cell.is_wrong else glyphs.good if cell.is_right else ""


def _in_line(texts: Sequence[str]) -> list[str]:
    """Set numbers below each other; other texts stay as they are."""
    found = [_NUMBER.match(text) for text in texts]
    if not all(match or not text for match, text in zip(found, texts, strict=True)):
        return list(texts)
    ends = [match.end() if match else 0 for match in found]
    return [" " * (max(ends, default=0) - end) + text if text else "" for end, text in zip(ends, texts, strict=True)]


def _spelled(text: str, glyphs: Glyphs) -> str:
    shown = printable(text)
    return shown.translate(_IN_ASCII) if glyphs == ASCII else shown


def _fitting(widths: list[int], room: int) -> int:
    """Return how many columns fit, at least two."""
    used = 0
    for count, width in enumerate(widths):
        used += width + GAP * bool(count)
        if used > room and count >= 2:
            return count
    return len(widths)
