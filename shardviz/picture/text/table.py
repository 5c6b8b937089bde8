"""Columns of text, aligned by screen width: wide (CJK) characters take two columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.picture.text.terminal import DIM, line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.text import Text


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Fill text up to a width with spaces: behind it, or before it if it is set flush right."""
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def widest(texts: Iterable[str]) -> int:
    """Return the columns that the widest of some texts takes; 0 without any."""
    return max(map(cell_len, texts), default=0)


def align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return each row as one string, its cells below those of the other rows.

    Args:
        rows: Each with the same number of cells.
        left: How many of the first columns are set flush left; the others are flush right.
    """
    widths = [(at >= left, widest(column)) for at, column in enumerate(zip(*rows, strict=True))]
    return [
        "  ".join(pad(cell, width, right=right) for cell, (right, width) in zip(row, widths, strict=True))
        for row in rows
    ]


def table(rows: Sequence[Sequence[str]], left: int = 1, headings: int = 1) -> list[Text]:
    """Return rows of cells as lines, with dim headings. The arguments are those of `align`."""
    found = align(rows, left)
    return [*(line((heading, DIM)) for heading in found[:headings]), *map(line, found[headings:])]
