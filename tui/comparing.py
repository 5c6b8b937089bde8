"""Two dumps laid beside each other: which tensors both have, and what `shardviz diff` says of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardviz.names import printable

if TYPE_CHECKING:
    from shardviz.check.compare import Change, Difference

    from .document import Document, Entry

Relation = Literal["different", "only here", "only there", "same", "not compared"]

SIGNS: dict[Relation, str] = {"different": "≠", "only here": "<", "only there": ">", "same": "=", "not compared": "?"}
"""One sign a relation, in the order in which they are listed."""


@dataclass(frozen=True)
class Pair:
    """One tensor in two dumps.

    Attributes:
        title: Its name.
        here: Its entry in the first dump, if it is there.
        there: Its entry in the second, if it is there.
        relation: How they compare.
        what: What differs, in words; empty where nothing does.
    """

    title: str
    here: int | None
    there: int | None
    relation: Relation
    what: str = ""


def pairs(here: Document, there: Document, difference: Difference) -> list[Pair]:
    """Pair the tensors of two dumps by name and role, in the first one's order; those that differ come first."""
    from shardviz.check.compare import KEPT

    compared = {role for _, role in KEPT}
    changes: dict[str, list[Change]] = {}
    for change in difference.changes:
        changes.setdefault(change.tensor, []).append(change)
    others = {_key(entry): index for index, entry in enumerate(there.entries)}
    found = []
    for index, entry in enumerate(here.entries):
        other = others.pop(_key(entry), None)
        if other is None:
            found.append(Pair(entry.title, index, None, "only here"))
        else:
            changed = [change for name in entry.tensor.names for change in changes.get(name, ())]
            alike: Relation = "different" if changed else "same"
            relation = alike if entry.tensor.role in compared else "not compared"
            found.append(Pair(entry.title, index, other, relation, _words(changed)))
    found += [Pair(there.entries[index].title, None, index, "only there") for index in others.values()]
    return sorted(found, key=lambda pair: list(SIGNS).index(pair.relation))


def _key(entry: Entry) -> tuple[str, str]:
    return entry.tensor.name, entry.tensor.role


def _words(changed: list[Change]) -> str:
    """Say the first thing that changed, and what others did."""
    if not changed:
        return ""
    first = changed[0]
    others = dict.fromkeys(change.aspect for change in changed if change.aspect != first.aspect)
    also = f", and {', '.join(others)}" if others else ""
    return f"{first.aspect} {printable(first.before)} → {printable(first.after)}{also}"
