"""A page of the catalogue as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.text.terminal import DIM, line, wrapped

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.explain.pages import Page
    from shardviz.picture.text.terminal import Terminal

SHORT = 8
"""Titles of rows up to this length share a column; if one is longer, as names of causes are, each has its own line."""


def page_lines(page: Page, terminal: Terminal) -> list[Text]:
    """Return a page: its name, what happens, how one gets there, and its rows."""
    lines = [line((page.name, "bold"))]
    lines += wrapped(page.title, terminal.width, line("  "), 2)
    for paragraph in page.paragraphs:
        lines += [line(""), *wrapped(paragraph, terminal.width, line("  "), 2)]
    lines.append(line(""))
    are_short = all(len(title) <= SHORT for title, _ in page.rows)
    for title, text in page.rows:
        if are_short:
            lines += wrapped(text, terminal.width, line((f"  {title:<{SHORT + 2}}", DIM)), SHORT + 4)
        else:
            lines += [line((f"  {title}", "bold")), *wrapped(text, terminal.width, line("    "), 4)]
    return lines
