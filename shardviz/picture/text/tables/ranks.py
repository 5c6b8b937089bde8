"""The list of ranks below a picture: the claimed and the held part of each, those that findings name marked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.model.subjects.subject import NOTHING, PLAIN
from shardviz.picture.text.tables.table import aligned
from shardviz.picture.text.terminal import BAD, DIM, line
from shardviz.text import counted, join_numbers

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.picture.model.subjects.subject import Subject
    from shardviz.picture.text.terminal import Terminal

MOST_RANK_LINES = 32


def rank_lines(subject: Subject, terminal: Terminal, *, all_ranks: bool = False) -> list[Text]:
    """List the claimed and the held part of each rank; ranks with the same parts share a line.

    Args:
        subject: The tensor.
        terminal: What the list is for.
        all_ranks: Print every line, however many there are.
    """
    rows, left = rank_rows(subject, None if all_ranks else MOST_RANK_LINES)
    lines = _rank_table(rows, terminal, subject) if rows else []
    if left:
        more = f"{counted(left, 'more line')}: --all prints {'it' if left == 1 else 'them'}"
        lines.append(line((f"{terminal.glyphs.more} {more}", DIM)))
    return lines


@dataclass(frozen=True, slots=True)
class RankRow:
    """A line of the list of ranks.

    Attributes:
        ranks: The ranks, in words.
        claims: The part that they claim; empty if unknown.
        holds: The part that they hold; empty if unknown.
        is_named: Whether a finding names them.
    """

    ranks: str
    claims: str
    holds: str
    is_named: bool = False

    @property
    def is_same(self) -> bool:
        """Whether they hold the part they claim, or one of the two is unknown."""
        return self.claims in ("", PLAIN) or self.holds in ("", self.claims)


def rank_rows(subject: Subject, most: int | None) -> tuple[list[RankRow], int]:
    """Return rows of ranks with their claimed and held parts, and how many rows are left out.

    Args:
        subject: The tensor.
        most: Rows to return at most, those that differ or that findings name before the others; None for all.
    """
    marked = subject.marked
    groups: dict[tuple[str, str, bool], list[int]] = {}
    for rank in sorted({*subject.claims, *subject.holds}):
        key = (subject.claims.get(rank, ""), subject.holds.get(rank, ""), rank in marked)
        groups.setdefault(key, []).append(rank)
    rows = [RankRow(join_numbers(ranks, ","), *key) for key, ranks in groups.items()]
    order = sorted(range(len(rows)), key=lambda at: (rows[at].is_same, not rows[at].is_named))[:most]
    return [rows[at] for at in sorted(order)], len(rows) - len(order)


def _rank_table(rows: list[RankRow], terminal: Terminal, subject: Subject) -> list[Text]:
    heads = ("ranks", subject.sides.titles[0] if subject.name else "part", subject.sides.titles[1])
    cells = [(terminal.spelled(row.ranks), row.claims, row.holds) for row in rows]
    kept = [column for column in range(3) if column == 0 or any(row[column] for row in cells)]
    if len(kept) == 3 and all(row.claims == row.holds for row in rows):
        heads, kept = ("ranks", " and ".join(subject.sides.titles), ""), [0, 1]
    heading, *texts = aligned([[row[column] for column in kept] for row in (heads, *cells)], len(kept))
    lines = [line((f"   {heading}", DIM))]
    owners = _owners(subject)
    for row, text in zip(rows, texts, strict=True):
        if row.is_same and not row.is_named:
            lines.append(line(f"   {text}"))
            continue
        is_moved = not row.is_same and row.holds in owners
        owner = f"  the part of {ranks_in_words(owners[row.holds], 20)}" if is_moved else ""
        lines.append(line((f"{terminal.glyphs.wrong:<3}{text}", BAD), owner))
    return lines


def _owners(subject: Subject) -> dict[str, list[int]]:
    """Return the ranks that should hold each part; nothing is nobody's, nor is what no placements assign."""
    owners: dict[str, list[int]] = {}
    for rank, text in subject.claims.items():
        if text not in (NOTHING, PLAIN):
            owners.setdefault(text, []).append(rank)
    return owners
