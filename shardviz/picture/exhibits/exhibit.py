"""A table of what disagrees, with the cells that are wrong marked: text, SVG, HTML and the viewer draw the same one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_ROWS = 8
MOST_CELLS = 6
"""Rows and values per row of an exhibit: enough to see a rule, few enough to read."""

MOST_RANKS = 24
"""Characters of a row's ranks."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of an exhibit.

    Attributes:
        text: What it says.
        is_wrong: Whether it is marked.
    """

    text: str
    is_wrong: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of an exhibit.

    Attributes:
        title: Whose row it is: ranks, or the unsharded model.
        cells: One per column after the title.
    """

    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """What a finding is seen by.

    Attributes:
        caption: What the table has, in a few words.
        heads: The titles of its columns, that of the rows' own titles first.
        rows: Its rows.
        left_out: How many rows more there are.
    """

    caption: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: int = 0


def exhibit(caption: str, heads: Iterable[str], rows: Sequence[Row]) -> Exhibit | None:
    """Make an exhibit of the first rows; None where there are none.

    Args:
        caption: What the table has.
        heads: The titles of its columns.
        rows: All rows, those that are wrong first where not all can be shown.
    """
    if not rows:
        return None
    return Exhibit(caption, tuple(heads), tuple(rows[:MOST_ROWS]), max(len(rows) - MOST_ROWS, 0))


def title_of(ranks: Sequence[int]) -> str:
    """Name a row's ranks."""
    return ranks_in_words(ranks, MOST_RANKS)


def plain(texts: Iterable[object]) -> tuple[Cell, ...]:
    """Return cells without a mark."""
    return tuple(Cell(str(text)) for text in texts)
