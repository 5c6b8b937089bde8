"""A page of the catalogue as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.text.terminal import DIM, line, wrapped

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.explain.pages import Page
    from shardviz.picture.text.terminal import Terminal

SHORT = 10
"""Titles of rows up to this length share a column; a longer one, such as a cause's name, has a line of its own."""


def page_lines(page: Page, terminal: Terminal) -> list[Text]:
    """Return a page: its name, what happens, how one gets there, and its rows."""
    lines = [line((page.name, "bold"))]
    lines += wrapped(page.title, terminal.width, line("  "), 2)
    for paragraph in page.paragraphs:
        lines += [line(""), *wrapped(paragraph, terminal.width, line("  "), 2)]
    lines.append(line(""))
    for title, text in page.rows:
        if len(title) > SHORT:
            lines += [line(("  " + title, "bold")), *wrapped(text, terminal.width, line("    "), 4)]
        else:
            lines += wrapped(text, terminal.width, line((f"  {title:<{SHORT}}", DIM)), SHORT + 2)
    return lines
