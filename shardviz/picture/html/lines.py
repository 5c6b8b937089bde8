"""The lines of a module on a run's page: a table of what each gives every rank, and its type along each axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.html.parts import section
from shardviz.picture.markup import element, words

if TYPE_CHECKING:
    from shardviz.check.step.lines.types import Row, Table

HEADS = ("line", "source", "call", "type", "each rank has", "gradient")


def lines_section(table: Table | None) -> str:
    """Write the lines of the module that ranks looked into; nothing if they looked into none."""
    if table is None or not table.rows:
        return ""
    heads = element("tr", "".join(element("th", words(head), scope="col") for head in HEADS))
    body = element("table", heads, *map(_row, table.rows), class_="exhibit")
    wide = element("div", body, class_="wide", tabindex=0, role="region", aria_label="lines")
    return section("lines", words(f"Lines of {table.module or 'the model'}"), wide)


def _row(row: Row) -> str:
    cells = (row.place, row.source, row.function, row.types_text, row.held, row.gradient)
    line = (
        element("strong", words(f"{row.place} first wrong line"), class_="wrong") if row.is_wrong else words(row.place)
    )
    source = element("code", words(row.source))
    return element("tr", *(element("td", text) for text in (line, source, *map(words, cells[2:]))))
