"""A table of what disagrees, with the cells that are wrong marked: text, SVG, HTML and the viewer draw the same one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Literal

from shardviz.picture.model.holders import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Sign = Literal["differs", "same"]
"""The name of a glyph, as `terminal.Glyphs` has it."""

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
        sign: The glyph that marks it: it differs from what it should be, or is the same where it should not.
    """

    text: str
    is_wrong: bool = False
    sign: Sign = "differs"


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
        sums_up: Whether the last row is what the others are held against, and stays where there is room for few.
    """

    caption: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: int = 0
    sums_up: bool = False

    @property
    def shown(self) -> int:
        """How many rows come before those that are left out."""
        return len(self.rows) - self.sums_up


def exhibit(
    caption: str, heads: Sequence[str], rows: Sequence[Row], left_out: int = 0, *, sums_up: bool = False
) -> Exhibit | None:
    """Make an exhibit of the first rows, without columns that say nothing; None where there are no rows.

    Args:
        caption: What the table has.
        heads: The titles of its columns.
        rows: The rows, those that are wrong first where not all can be shown.
        left_out: How many rows there are beside these.
        sums_up: Whether the last row stays where there is room for few.
    """
    if not rows:
        return None
    shown = _first(rows, MOST_ROWS, sums_up=sums_up)
    said = [any(row.cells[at].text for row in shown if at < len(row.cells)) for at in range(len(heads) - 1)]
    kept = tuple(Row(row.title, tuple(compress(row.cells, said))) for row in shown)
    return Exhibit(caption, (heads[0], *compress(heads[1:], said)), kept, len(rows) - len(shown) + left_out, sums_up)


def _first(rows: Sequence[Row], most: int, *, sums_up: bool) -> Sequence[Row]:
    """Return the first rows, with the last one among them where it sums up the others."""
    return rows[:most] if len(rows) <= most or not sums_up else [*rows[: most - 1], rows[-1]]


def cut_to(whole: Exhibit, most: int) -> Exhibit:
    """Return the first rows of an exhibit, where there is room for no more."""
    over = max(len(whole.rows) - most, 0)
    rows = tuple(_first(whole.rows, most, sums_up=whole.sums_up))
    return replace(whole, rows=rows, left_out=whole.left_out + over) if over else whole


def title_of(ranks: Sequence[int]) -> str:
    """Name a row's ranks, and say how many they are where not all can be named."""
    title = ranks_in_words(ranks, MOST_RANKS)
    return f"{len(ranks):,} {title}" if title.endswith("...") else title


def plain(texts: Iterable[object]) -> tuple[Cell, ...]:
    """Return cells without a mark."""
    return tuple(Cell(str(text)) for text in texts)
