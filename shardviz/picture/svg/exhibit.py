"""An exhibit as SVG: its table, the cells that are wrong in colour and behind the glyph `≠`."""

from __future__ import annotations

from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.picture.markup import element, words
from shardviz.picture.svg.mesh import Drawn
from shardviz.picture.svg.tile import CHAR
from shardviz.picture.text.tables.exhibit import cell_text
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import printable

if TYPE_CHECKING:
    from shardviz.picture.exhibits.exhibit import Exhibit

LINE = 18
GAP = 16


def exhibit_drawing(exhibit: Exhibit) -> Drawn:
    """Draw an exhibit with its caption above."""
    rows = [
        [(head, "sv-soft") for head in exhibit.heads],
        *(
            [
                (printable(row.title), "sv-soft"),
                *((cell_text(cell, UNICODE), "sv-bad" if cell.is_wrong else "sv-c") for cell in row.cells),
            ]
            for row in exhibit.rows
        ),
    ]
    if exhibit.left_out:
        rows.insert(1 + exhibit.shown, [(f"{exhibit.left_out:,} more", "sv-soft")])
    widths = [max(cell_len(text) for text, _ in column) for column in zip_longest(*rows, fillvalue=("", ""))]
    lefts = list(accumulate((round(width * CHAR) + GAP for width in widths), initial=0))
    markup = element("text", words(exhibit.caption), x=0, y=14, class_="sv-h")
    for at, row in enumerate(rows, 1):
        for left, (text, style) in zip(lefts, row, strict=False):
            markup += element("text", words(text), x=left, y=14 + at * LINE, class_=style) if text else ""
    height = LINE * (len(rows) + 1)
    return Drawn(markup, max(lefts[-1] - GAP, round(cell_len(exhibit.caption) * CHAR)), height)
