"""The order of a page's lines: that of the model, but all layers of one weight are together, and rise."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardviz.layout.region import merged
from shardviz.text import Fold

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = TypeVar("Item")


def in_natural_order(folded: Sequence[tuple[Fold, Item]]) -> list[tuple[Fold, Item]]:
    """Sort folds: checkpoints have layer 10 before layer 2, and one odd layer would stand behind all others."""
    first: dict[tuple[str, str], int] = {}
    for at, (names, _) in enumerate(folded):
        first.setdefault((names.prefix, names.suffix), at)
    rising = [(Fold(names.prefix, merged(sorted(names.numbers)), names.suffix), item) for names, item in folded]
    return sorted(rising, key=lambda entry: (first[entry[0].prefix, entry[0].suffix], entry[0].numbers))
