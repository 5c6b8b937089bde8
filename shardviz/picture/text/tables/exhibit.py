"""An exhibit as text: its table within the terminal's width, the cells that are wrong in color and with a glyph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.exhibits.exhibit import columns_of
from shardviz.picture.exhibits.steps import LEVELS
from shardviz.picture.model.palette import RIGHT, WRONG
from shardviz.picture.text.tables.table import padded, widest
from shardviz.picture.text.terminal import ASCII, BAD, DIM, GOOD, line, wrapped
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.picture.exhibits.exhibit import Cell, Exhibit
    from shardviz.picture.text.terminal import Terminal

INDENT = "   "
GAP = 2
_IN_ASCII = str.maketrans(
    dict(zip(LEVELS, ".12345678", strict=True)) | {"…": ASCII.more, WRONG: ASCII.wrong, RIGHT: ASCII.good}
)


def exhibit_lines(exhibit: Exhibit, terminal: Terminal) -> list[Text]:
    """Return an exhibit's caption and table; columns that do not fit are left out from the right, where `…` says so."""
    spelled = _in_ascii if terminal.glyphs == ASCII else printable
    titles = [spelled(title) for title in (exhibit.heads[0], *(row.title for row in exhibit.rows))]
    columns = columns_of(exhibit, spelled)
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


def _in_ascii(text: str) -> str:
    return printable(text).translate(_IN_ASCII)


def _fitting(widths: list[int], room: int) -> int:
    """Return how many columns fit, at least two."""
    used = 0
    for count, width in enumerate(widths):
        used += width + GAP * bool(count)
        if used > room and count >= 2:
            return count
    return len(widths)
