"""Names that are folded by a layer's number already, folded by one more: that of an expert in each layer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from shardviz.text import cut, fold

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

Key = TypeVar("Key", bound="Hashable")

NUMBERS = re.compile(r"(?<![^.])\[[0-9,-]+\](?![^.])")
"""The numbers of a folded name: `[0-3,7]`."""


def fold_again(named: Iterable[tuple[str, Key]]) -> list[tuple[str, Key, int]]:
    """Fold names that share everything but their last number, and a key.

    Returns:
        Each fold as text, its key, and how many names it has.

    Example:
        >>> fold_again([("layers.[0-3].experts.0.w", 8), ("layers.[0-3].experts.1.w", 8), ("layers.4.w", 8)])
        [('layers.[0-3].experts.[0-1].w', 8, 2), ('layers.4.w', 8, 1)]
    """
    return [(str(folded), key, len(folded)) for folded, key in fold(named, by_last=True)]


def kind_of(module: str) -> str:
    """Return a name with a star for its first number, or for all numbers folded into it: layers are alike.

    Example:
        >>> kind_of("layers.7.w1"), kind_of("layers.[0-3,7].w1"), kind_of("layers.[0-3].experts.0.w1")
        ('layers.*.w1', 'layers.*.w1', 'layers.*.experts.0.w1')
    """
    starred = NUMBERS.sub("*", module)
    before, number, after = cut(starred)
    return starred if number is None or "*" in before else f"{before}*{after}"
