"""The parts of a run's page: a section, a table that scrolls, bars, bytes in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.markup import element, words
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardviz.picture.exhibits.exhibit import Exhibit


def section(anchor: str, title: str, *parts: str) -> str:
    """Write a part of the page with its heading."""
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), *parts, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def scrolled(table: str, label: str) -> str:
    """Let a wide table scroll by itself, by keyboard too."""
    return element("div", table, class_="wide", tabindex=0, role="region", aria_label=label)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], label: str, left: int = 1) -> str:
    """Write a table.

    Args:
        heads: Markup of the columns' titles.
        rows: Markup of the cells.
        label: What the table is, for a screen reader.
        left: How many of the first columns are set flush left; the others are flush right.
    """

    def aligned(column: int) -> str | None:
        return "number" if column >= left else None

    titles = (element("th", text, scope="col", class_=aligned(at)) for at, text in enumerate(heads))
    body = []
    for first, *others in rows:
        cells = (element("td", cell, class_=aligned(at)) for at, cell in enumerate(others, 1))
        body.append(element("tr", element("th", first, scope="row"), *cells))
    return scrolled(element("table", element("thead", element("tr", *titles)), element("tbody", *body)), label)


def exhibit_table(exhibit: Exhibit) -> str:
    """Write what a finding is seen by as a table with a caption; wrong cells are marked by colour and by a glyph."""
    heads = (element("th", words(head), scope="col") for head in exhibit.heads)
    body = []
    for row in exhibit.rows:
        cells = (
            element("td", words(f"≠ {cell.text}" if cell.is_wrong else cell.text), class_=_WRONG[cell.is_wrong])
            for cell in row.cells
        )
        body.append(element("tr", element("th", words(row.title), scope="row"), *cells))
    caption = element("caption", words(exhibit.caption))
    more = element("p", f"{exhibit.left_out:,} more rows", class_="soft") if exhibit.left_out else ""
    head = element("thead", element("tr", *heads))
    return scrolled(element("table", caption, head, element("tbody", *body), class_="exhibit"), exhibit.caption) + more


_WRONG = {True: "wrong", False: None}


def bar(parts: Iterable[tuple[str, int, str]], most: int) -> str:
    """Draw stretches next to each other, each to scale; the numbers are beside it in words.

    Args:
        parts: The class that colours each, its size, and its tooltip.
        most: The size that takes the whole width.
    """
    drawn = (
        element("span", class_=colour, style=f"width:{100 * size / max(most, 1):.2f}%", title=tooltip)
        for colour, size, tooltip in parts
        if size
    )
    return element("div", *drawn, class_="bar", aria_hidden="true")


def bytes_cell(count: int) -> str:
    """Write a number of bytes, with the exact number as tooltip."""
    return element("span", words(bytes_text(count)), title=f"{count:,} bytes")
