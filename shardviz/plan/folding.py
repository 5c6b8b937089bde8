"""Names folded by layer, folded once more by the number of an expert in each layer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from shardviz.text import cut_at_number, fold

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

Key = TypeVar("Key", bound="Hashable")

NUMBERS = re.compile(r"(?<![^.])\[[0-9,-]+\](?![^.])")
"""The numbers of a folded name: `[0-3,7]`."""

_FOLDED = re.compile(r"(?P<before>.*?)\[(?P<numbers>[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)\](?P<after>.*)")


def unfold(name: str) -> list[str]:
    """Return the names that a folded one, `layers.[0-3,7].experts.[0-7].weight`, stands for."""
    match = _FOLDED.fullmatch(name)
    if match is None:
        return [name]
    spans = (span.partition("-") for span in match["numbers"].split(","))
    numbers = (number for first, _, last in spans for number in range(int(first), int(last or first) + 1))
    afters = unfold(match["after"])
    return [f"{match['before']}{number}{after}" for number in numbers for after in afters]


def fold_all(named: Iterable[tuple[str, Key]]) -> list[tuple[str, Key, int, int]]:
    """Fold equal layers of all pipeline stages, and what is equal within them.

    Returns:
        Each fold as text, its key, how many names it has in a layer, and how many in all.

    Example:
        >>> fold_all([("layers.[0-3].w", 8), ("layers.[4-6].w", 8), ("layers.7.w", 8), ("norm.w", 8)])
        [('layers.[0-7].w', 8, 1, 8), ('norm.w', 8, 1, 1)]
    """
    layers = fold((single, key) for name, key in named for single in unfold(name))
    folds = fold_again((str(layer), (key, len(layer))) for layer, key in layers)
    return [(name, key, in_each, count * in_each) for name, (key, count), in_each in folds]


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
    """Return a name with a star for its first number or folded numbers: layers are alike.

    Example:
        >>> kind_of("layers.7.w1"), kind_of("layers.[0-3,7].w1"), kind_of("layers.[0-3].experts.0.w1")
        ('layers.*.w1', 'layers.*.w1', 'layers.*.experts.0.w1')
    """
    starred = NUMBERS.sub("*", module)
    before, number, after = cut_at_number(starred)
    return starred if number is None or "*" in before else f"{before}*{after}"
