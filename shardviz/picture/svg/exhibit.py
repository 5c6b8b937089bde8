"""An exhibit as SVG: its table, the cells that are wrong in colour and behind a glyph."""

from __future__ import annotations

from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.picture.exhibits.columns import columns_of
from shardviz.picture.markup import element, words
from shardviz.picture.svg.mesh import Drawn
from shardviz.picture.svg.tile import CHAR
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import printable

if TYPE_CHECKING:
    from shardviz.picture.exhibits.exhibit import Exhibit

LINE = 18
GAP = 16


def exhibit_drawing(exhibit: Exhibit) -> Drawn:
    """Draw an exhibit with its caption above."""
    columns = columns_of(exhibit)
    lines = [[(text, "sv-soft") for text in (exhibit.heads[0], *(column[0] for column in columns))]]
    for at, row in enumerate(exhibit.rows, 1):
        styles = ["sv-bad" if cell.is_wrong else "sv-good" if cell.is_right else "sv-c" for cell in row.cells]
        cells = zip((column[at] for column in columns), styles, strict=False)
        lines += [[]] if row.is_apart and at > 1 else []
        lines.append([(printable(row.title), "sv-soft"), *cells])
    if exhibit.left_out:
        lines.insert(len(lines) - exhibit.sums_up, [(f"{UNICODE.more} {exhibit.more}", "sv-soft")])
    widths = [max(cell_len(text) for text, _ in column) for column in zip_longest(*lines, fillvalue=("", ""))]
    lefts = list(accumulate((round(width * CHAR) + GAP for width in widths), initial=0))
    markup = element("text", words(exhibit.caption), x=0, y=14, class_="sv-h")
    for at, line in enumerate(lines, 1):
        for left, (text, style) in zip(lefts, line, strict=False):
            markup += element("text", words(text), x=left, y=14 + at * LINE, class_=style) if text else ""
    height = LINE * (len(lines) + 1)
    return Drawn(markup, max(lefts[-1] - GAP, round(cell_len(exhibit.caption) * CHAR)), height)
