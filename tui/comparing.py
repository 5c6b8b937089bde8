"""Two dumps laid beside each other: which tensors both have, and whether their ranks claim and hold the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardviz.dump.tensors import Tensor

    from .document import Document

Relation = Literal["same", "different", "only here", "only there"]

SIGNS: dict[Relation, str] = {"same": "=", "different": "≠", "only here": "<", "only there": ">"}


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


def pairs(here: Document, there: Document) -> list[Pair]:
    """Pair the tensors of two dumps by name and role, in the first one's order; those that differ come first."""
    others = {(entry.tensor.name, entry.tensor.role): index for index, entry in enumerate(there.entries)}
    found = []
    for index, entry in enumerate(here.entries):
        other = others.pop((entry.tensor.name, entry.tensor.role), None)
        if other is None:
            found.append(Pair(entry.title, index, None, "only here"))
        else:
            what = difference(entry.tensor, there.entries[other].tensor)
            found.append(Pair(entry.title, index, other, "different" if what else "same", what))
    found += [Pair(there.entries[index].title, None, index, "only there") for index in others.values()]
    return sorted(found, key=lambda pair: pair.relation == "same")


def difference(here: Tensor, there: Tensor) -> str:
    """Say what differs between two tensors; empty where every rank claims and holds the same."""
    if here.shape != there.shape:
        return f"shape {list(here.shape)} and {list(there.shape)}"
    if here.dtype != there.dtype:
        return f"{here.dtype} and {there.dtype}"
    if here.shards.keys() != there.shards.keys():
        return f"on {len(here.shards):,} and {len(there.shards):,} ranks"
    both = [(shard, there.shards[rank]) for rank, shard in here.shards.items()]
    if any(one.layout != other.layout for one, other in both):
        return "claimed"
    held = sum((one.body.held, one.body.runs) != (other.body.held, other.body.runs) for one, other in both)
    if held:
        return f"held by {held:,} of {len(both):,} ranks"
    values = sum(one.digests != other.digests for one, other in both)
    return f"values on {values:,} of {len(both):,} ranks" if values else ""
