"""A table of what disagrees, with wrong cells marked; text, SVG, HTML and viewer draw it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import mask_of, ranks_in_words, ranks_text
from shardviz.picture.model.mesh import rank_labels
from shardviz.picture.model.palette import RIGHT, WRONG, Coloring
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardviz.layout.mesh import Mesh

MOST_ROWS = 8

MOST_CELLS = 8
"""Rows and values per row of an exhibit: enough to see a rule, few enough to read."""

MOST_RANKS = 24
"""Characters of a row's ranks."""

FEW_RANKS = 16
"""On a mesh of so many ranks, numbers alone say which one is meant."""

SHORT = 12
"""Rank numbers up to this many characters are written out, whatever their coordinates are."""

_NUMBER = re.compile(r"-?(?:\d+|inf|nan)(?=(?:[./e][-+.e\d]*)?$)")
"""A number up to its decimal point, or to the line of a fraction."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of an exhibit.

    Attributes:
        text: What it says.
        is_wrong: Whether it is marked as wrong.
        is_right: Whether it is marked as right, if that is not to be expected beside wrong ones.
    """

    text: str
    is_wrong: bool = False
    is_right: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of an exhibit.

    Attributes:
        title: Whose row it is: ranks, or the unsharded model.
        cells: One per column after the title.
        count: How many of the things that an exhibit counts it stands for; 0 if the next row is about the same.
        is_apart: Whether it begins a group of rows that are held against each other, and not against those before.
    """

    title: str
    cells: tuple[Cell, ...]
    count: int = 1
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A small table that shows a finding.

    Attributes:
        caption: What the table has, in a few words.
        heads: The titles of its columns, that of the rows' own titles first.
        left_out: How many more of what its rows stand for there are.
        sums_up: Whether the last row is what the others are held against, and stays if there is room for few.
        noun: What its rows stand for.
        rest: What all that is left out has in common.
    """

    caption: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: int = 0
    sums_up: bool = False
    noun: str = "row"
    rest: str = ""

    @property
    def shown(self) -> int:
        """How many rows come before those that are left out."""
        return len(self.rows) - self.sums_up

    @property
    def more(self) -> str:
        """What is left out, in words: `125 more ranks`."""
        return counted(self.left_out, f"more {self.noun}") + (f", {self.rest}" if self.rest else "")


def exhibit(
    caption: str,
    heads: Sequence[str],
    rows: Sequence[Row],
    left_out: int = 0,
    *,
    sums_up: bool = False,
    noun: str = "row",
    rest: str = "",
) -> Exhibit | None:
    """Make an exhibit of the first rows, without empty columns; None if there are no rows.

    The arguments are those of `Exhibit`. If not all rows fit, callers put wrong ones first.
    """
    if not rows:
        return None
    said = [any(row.cells[at].text for row in rows if at < len(row.cells)) for at in range(len(heads) - 1)]
    kept = tuple(replace(row, cells=tuple(compress(row.cells, said))) for row in rows)
    whole = Exhibit(caption, (heads[0], *compress(heads[1:], said)), kept, left_out, sums_up, noun, rest)
    return cut_to(whole, MOST_ROWS)


def cut_to(whole: Exhibit, most: int) -> Exhibit:
    """Keep the first `most` rows of an exhibit, and the last one if it sums the others up.

    A single row is never left out: the line that says so would take its place. Rows that belong together stay together.
    """
    if len(whole.rows) <= most + (not whole.left_out):
        return whole
    last = whole.rows[-1:] if whole.sums_up else ()
    first = whole.rows[: most - len(last)]
    while len(first) > 1 and not first[-1].count:
        first = first[:-1]
    rows = (*first, *last)
    over = sum(row.count for row in whole.rows) - sum(row.count for row in rows)
    return replace(whole, rows=rows, left_out=whole.left_out + over)


def title_of(ranks: Sequence[int], mesh: Mesh | None = None) -> str:
    """Name a row's ranks by number, or by coordinate if that is clearer, with their count."""
    place, also = _place_of(ranks, mesh)
    return f"{place} ({also})" if also else place


def due_and_held(ranks: Sequence[int], mesh: Mesh, due: Sequence[str], has: Sequence[str]) -> tuple[Row, Row]:
    """Return a row of expected values and below it one of actual values, differences marked."""
    title, _ = _place_of(ranks, mesh)
    cells = tuple(Cell(own, own != other) for own, other in zip(has, due, strict=True))
    held = Row(f"{title} {'hold' if len(ranks) > 1 else 'holds'}", cells, len(ranks))
    return Row(f"{title} should hold", plain(due), count=0), held


def _place_of(ranks: Sequence[int], mesh: Mesh | None) -> tuple[str, str]:
    """Return the shortest name of ranks, and what stands in parentheses behind it."""
    if mesh is not None and all(rank in mesh for rank in ranks) and (found := _on_mesh(ranks, mesh)):
        return found
    numbers = ranks_in_words(ranks, MOST_RANKS)
    return f"{len(ranks):,} {numbers}" if numbers.endswith("...") else numbers, ""


def _on_mesh(ranks: Sequence[int], mesh: Mesh) -> tuple[str, str] | None:
    """Name ranks of a mesh by their place on it; None if their numbers are as good."""
    is_large = mesh.size > FEW_RANKS
    if len(ranks) == 1:
        return (f"rank {ranks[0]}", mesh.label(ranks[0])) if is_large and mesh.ndim > 1 else None
    if is_large and len(ranks) == mesh.size:
        return f"all {len(ranks):,} ranks", ""
    numbers = ranks_text(mask_of(ranks))
    if len(numbers) <= SHORT and "…" not in numbers:
        return None
    labels = rank_labels(mask_of(ranks), Coloring(mesh))
    if label := next((label for label in labels if "=" in label and len(label) <= MOST_RANKS), ""):
        return label, f"{len(ranks):,} ranks"
    others = sorted(set(mesh.ranks) - set(ranks)) if is_large else []
    is_said = 0 < len(others) < len(ranks) and len(ranks_in_words(others)) <= MOST_RANKS
    return (f"all but {ranks_in_words(others)}", "") if is_said else None


def plain(texts: Iterable[object]) -> tuple[Cell, ...]:
    """Return cells without a mark."""
    return tuple(Cell(str(text)) for text in texts)


def columns_of(exhibit: Exhibit, spelled: Callable[[str], str] = printable) -> list[list[str]]:
    """Return the columns after the first as texts, heading first, with decimal points aligned.

    Args:
        spelled: Writes a text, or a sign, in the characters that can be shown.
    """
    return [
        _column(spelled(head), [row.cells[at] if at < len(row.cells) else None for row in exhibit.rows], spelled)
        for at, head in enumerate(exhibit.heads[1:])
    ]


def _column(head: str, cells: Sequence[Cell | None], spelled: Callable[[str], str]) -> list[str]:
    """Write the cells of a column; cells without a sign are indented like those with one."""
    texts = _in_line([spelled(cell.text) if cell else "" for cell in cells])
    signs = [spelled(_sign(cell)) for cell in cells]
    if not any(signs):
        return [head, *texts]
    marked = (f"{sign or ' '} {text}" if text else "" for sign, text in zip(signs, texts, strict=True))
    return [f"  {head}", *marked]


def _sign(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return WRONG if cell.is_wrong else RIGHT if cell.is_right else ""


def _in_line(texts: Sequence[str]) -> list[str]:
    """Set numbers below each other; other texts stay as they are."""
    matches = [_NUMBER.match(text) for text in texts]
    if not all(match or not text for match, text in zip(matches, texts, strict=True)):
        return list(texts)
    ends = [match.end() if match else 0 for match in matches]
    return [" " * (max(ends, default=0) - end) + text if text else "" for end, text in zip(ends, texts, strict=True)]
