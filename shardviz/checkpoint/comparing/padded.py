"""Pairs in which a map pads the end of one side: what is compared, and padding that is found in other places."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.changes import change_of
from shardviz.checkpoint.maps.made import PAD, Made, Op, padding_text, unused_texts, without_padding
from shardviz.checkpoint.maps.numbering import starred
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardviz.checkpoint.comparing.outcome import Change
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.maps.made import Node
    from shardviz.checkpoint.records import Tensor


def padding_notes(pairs: Iterable[Pair], padded: Collection[str] = ()) -> list[str]:
    """Say what is not compared because the map says that it is padding, or makes nothing of it; once for all layers.

    Args:
        pairs: All pairs.
        padded: The names of those that are padded elsewhere than the map says: all of them is compared.
    """
    notes: dict[str, None] = {}
    every = list(pairs)
    for pair in (pair for pair in every if pair.name not in padded):
        for side in (pair.first, pair.second):
            if isinstance(side, Made) and (text := padding_text(side.node)):
                notes[f"{starred(printable(pair.name))}: padded: {text} are not compared"] = None
    sides = [side for pair in every for side in (pair.first, pair.second) if side is not None]
    nodes = [side.node if isinstance(side, Made) else side for side in sides]
    unused = (f"{starred(text)} are in nothing that the map makes, and not compared" for text in unused_texts(nodes))
    return [*notes, *dict.fromkeys(unused)]


def trimmed(pair: Pair) -> Pair:
    """Return a pair without the padding at the ends of both."""
    first, second = pair.first, pair.second
    if isinstance(first, Made) and second is not None:
        first, second = without_padding(first, second)
    elif isinstance(second, Made) and first is not None:
        second, first = without_padding(second, first)
    return pair if first is pair.first or second is pair.second else replace(pair, first=first, second=second)


def padded_otherwise(before: Tensor, after: Tensor) -> Change | None:
    """Return how a tensor was padded if the map pads its end; None if it was not padded."""
    inner = _inner(before), _inner(after)
    if inner == (before, after) or isinstance(inner[0], Op) or isinstance(inner[1], Op):
        return None
    change = change_of(inner[0], inner[1])
    return change if change.verdict == "padded" else None


def _inner(side: Tensor) -> Node:
    return side.node.parts[0] if isinstance(side, Made) and side.node.function == PAD else side
