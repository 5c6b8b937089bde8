"""The module tree of a run's page: modules that open, with tensors that open on their map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.check.verdicts import WORDS, worst
from shardviz.picture.html.parts import leaf, name_cell, scrolled
from shardviz.picture.markup import element, words
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import NO_FILE
from shardviz.picture.text.ranks import rank_rows
from shardviz.picture.text.terminal import UNICODE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.check.verdicts import Verdict
    from shardviz.picture.model.subject import Subject
    from shardviz.picture.text.ranks import RankRow
    from shardviz.picture.text.report import Row
    from shardviz.text import Fold

MOST_OPEN = 40
"""A tree of at most so many lines starts open; in a longer one only modules with findings are open."""

MOST_LEVELS = 12
"""How deep modules nest; deeper names are listed in the last module."""

MOST_ROWS = 40
"""Lines of ranks under a map."""

MOST_OPEN_ROWS = 8
"""A table of so many ranks or groups of ranks is open; a longer one is folded."""

Named = tuple[tuple[str, ...], "TreeEntry"]
"""The rest of a name, in its parts, and the entry that it names."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One line of the tree, with its map.

    Attributes:
        at: Its number.
        anchor: Where links to it lead.
        folded: The names that share it.
        row: The verdict, layout and local shapes that they share.
        bytes: Those of all its tensors, unsharded.
        picture: Its map; empty if it is not drawn.
        ranks: The parts of each rank, as a table.
        why: Why it is not drawn; empty if it is.
    """

    at: int
    anchor: str
    folded: Fold
    row: Row
    bytes: int
    picture: str
    ranks: str
    why: str


def tree(entries: Sequence[TreeEntry], shown: Mapping[int, str]) -> str:
    """Write the tree.

    Args:
        entries: Its lines, in the model's order.
        shown: By entry, the anchor of the finding under which its map is already drawn.
    """
    named = [(tuple(str(entry.folded).split(".")), entry) for entry in entries]
    return element("ul", *_items(named, shown, len(entries) <= MOST_OPEN, MOST_LEVELS), class_="tree")


def _items(named: Sequence[Named], shown: Mapping[int, str], is_open: bool, levels: int) -> Iterator[str]:
    """Write the content of a module; names that share their first part become a submodule."""
    groups: dict[str, list[Named]] = {}
    for at, (parts, entry) in enumerate(named):
        key = parts[0] if levels and len(parts) > 1 else f"{at} alone"
        groups.setdefault(key, []).append((parts, entry))
    for group in groups.values():
        if len(group) == 1:
            ((parts, entry),) = group
            yield element("li", _leaf(".".join(parts), entry, shown.get(entry.at)))
        else:
            yield element("li", _branch(group, shown, is_open, levels))


def _branch(group: Sequence[Named], shown: Mapping[int, str], is_open: bool, levels: int) -> str:
    shared = _num_shared_parts(group)
    name = ".".join(group[0][0][:shared])
    inner = [(parts[shared:], entry) for parts, entry in group]
    verdict = worst(entry.row.verdict for _, entry in group)
    count = sum(len(entry.folded) for _, entry in group)
    summary = element(
        "summary",
        sign(verdict),
        element("span", words(name), class_="name"),
        element("span", f"{count:,} tensors", class_="soft"),
    )
    opened = {"open": "open"} if is_open or verdict != "good" else {}
    return element("details", summary, element("ul", *_items(inner, shown, is_open, levels - 1)), **opened)


def _num_shared_parts(group: Sequence[Named]) -> int:
    """Return how many parts all names begin with, leaving each a name of its own."""
    most = min(len(parts) for parts, _ in group) - 1
    first = group[0][0]
    return next((at for at in range(most) if any(parts[at] != first[at] for parts, _ in group)), most)


def _leaf(name: str, entry: TreeEntry, finding: str | None) -> str:
    """Write a tensor's line, and under it its map and the parts of each rank."""
    summary = element(
        "summary",
        sign(entry.row.verdict),
        name_cell(name, entry.folded),
        element("code", words(entry.row.layout)),
        element("code", words(entry.row.local), class_="soft"),
    )
    link = element("p", "Drawn under ", element("a", "its finding", href=f"#{finding}"), ".")
    picture = entry.picture if finding is None else link
    inner = element("p", f"Not drawn: {words(entry.why)}") if entry.why else picture + entry.ranks
    verdict, is_open = entry.row.verdict, entry.row.verdict in ("error", "warning")
    return leaf(entry.anchor, entry.folded, summary, inner, size=entry.bytes, is_open=is_open, verdict=verdict)


def sign(verdict: Verdict) -> str:
    """Write a verdict as its glyph, and as a word for screen readers."""
    spoken = element("span", WORDS[verdict], class_="unseen")
    return element("span", element("span", UNICODE.of(verdict), aria_hidden="true"), spoken, class_=f"sign {verdict}")


def rank_table(subject: Subject) -> str:
    """Write the claimed and the held part of each rank, as a table."""
    rows, left = rank_rows(subject, MOST_ROWS)
    first, second = (title.capitalize() for title in subject.sides.titles)
    marks = [_mark(row, first.lower()) for row in rows]
    heads = ("Ranks", first, *((second,) if subject.holds else ()), *(("",) if subject.holds or any(marks) else ()))
    body = []
    for row, mark in zip(rows, marks, strict=True):
        cells = (row.ranks, row.claims, row.holds if subject.holds else mark, mark)[: len(heads)]
        marked = "error" if mark else None
        body.append(element("tr", *(element("td", words(cell)) for cell in cells), class_=marked))
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in heads)))
    more = element("p", f"{left:,} more lines: shardviz show with --all prints them") if left else ""
    written = (
        scrolled(element("table", head, element("tbody", *body), class_="sortable"), "What each rank holds") + more
    )
    summary = element("summary", f"Rank by rank: {len(rows) + left:,} different parts")
    opened = "open" if len(rows) <= MOST_OPEN_ROWS else None
    return element("details", summary, written, class_="ranks", open=opened)


def _mark(row: RankRow, should: str) -> str:
    """Say what is wrong with a row's ranks, if anything is."""
    if row.holds == NO_FILE:
        return f"{WRONG} left {NO_FILE}"
    if not row.is_same:
        return f"{WRONG} not as {should}"
    return f"{WRONG} named by the finding" if row.is_named else ""
