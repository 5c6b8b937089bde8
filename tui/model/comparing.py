"""Two dumps side by side: the tensors of both, and how `shardviz diff` compares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardviz.text import fold, printable

if TYPE_CHECKING:
    from shardviz.check.diff import Change, Difference

    from .document import Document

How = tuple[tuple[str, str, str], ...]
"""The differences between two tensors of one name: the aspect, before, after."""

Relation = Literal["different", "only here", "only there", "same", "not compared"]

SIGNS: dict[Relation, str] = {"different": "≠", "only here": "<", "only there": ">", "same": "=", "not compared": "?"}
"""One sign per relation, in the order in which they are listed."""


@dataclass(frozen=True)
class Pair:
    """One tensor in two dumps.

    Attributes:
        title: Its name.
        here: Its entry in the first dump; None if it has none.
        there: Its entry in the second dump; None if it has none.
        relation: How they compare.
        what: The difference in words; empty where there is none.
    """

    title: str
    here: int | None
    there: int | None
    relation: Relation
    what: str = ""


def pairs(here: Document, there: Document, difference: Difference) -> list[Pair]:
    """Pair the tensors of two dumps by name and role, in the first one's order, different ones first.

    Layers that are one entry in one dump may be several in the other: they are one pair where both dumps agree.
    """
    from shardviz.check.diff import KEPT

    compared = {role for _, role in KEPT}
    changes: dict[str, list[Change]] = {}
    for change in (*difference.changes, *difference.relaid):
        changes.setdefault(change.tensor, []).append(change)
    ours, theirs = _entries(here), _entries(there)
    found = []
    for key in dict.fromkeys([*ours, *theirs]):
        name, role = key
        changed = tuple(changes.get(name, ()))
        how = tuple((change.aspect, change.before, change.after) for change in changed)
        found.append((name, (ours.get(key), theirs.get(key), role in compared, how)))
    folded = [_pair(printable(str(names)), *both) for names, both in fold(found)]
    return sorted(folded, key=lambda pair: list(SIGNS).index(pair.relation))


def _entries(document: Document) -> dict[tuple[str, str], int]:
    """Return the index of each tensor's entry, by its name and role."""
    return {(name, entry.tensor.role): at for at, entry in enumerate(document.entries) for name in entry.tensor.names}


def _pair(title: str, here: int | None, there: int | None, is_compared: bool, how: How) -> Pair:
    if here is None or there is None:
        return Pair(title, here, there, "only there" if here is None else "only here")
    if not is_compared:
        return Pair(title, here, there, "not compared")
    return Pair(title, here, there, "different" if how else "same", _words(how))


def _words(how: How) -> str:
    """Write the first aspect that changed, and the names of the others."""
    if not how:
        return ""
    (aspect, before, after), *others = how
    more = [other for other in dict.fromkeys(other for other, _, _ in others) if other != aspect]
    also = f", and {', '.join(more)}" if more else ""
    return f"{aspect} {printable(before)} → {printable(after)}{also}"
