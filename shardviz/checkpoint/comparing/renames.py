"""Tensors whose names alone differ: all of them, which a loader may expect, or some of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardviz.checkpoint.maps.mapped_tensors import MappedTensor
from shardviz.explain.checkpoints.conversion import RenamedInPart
from shardviz.reference.names import WRAPPED, WRAPPERS
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair

    Outcomes = list[tuple[Outcome, Pair]]

OF_LIBRARIES = frozenset(word for wrapper in (*WRAPPERS, *WRAPPED) for word in wrapper.split(".") if word)


def changed_words(name: str, other: str) -> tuple[str, str]:
    """Return the words of a name that a second name lacks, and what the second has in their place.

    Example:
        >>> changed_words("model.embed.weight", "model.module.embed.weight")
        ('', 'module.')
    """
    first, second = name.split("."), other.split(".")
    shared = min(len(first), len(second))
    begin = next((at for at in range(shared) if first[at] != second[at]), shared)
    end = next((at for at in range(shared - begin) if first[-1 - at] != second[-1 - at]), shared - begin)
    lost, new = first[begin : len(first) - end], second[begin : len(second) - end]
    return "".join(f"{word}." for word in lost), "".join(f"{word}." for word in new)


def with_renamed(outcomes: Outcomes, *, is_map_known: bool = True) -> Outcomes:
    """Report equal tensors under other names if most names are equal and no map says the names.

    Args:
        outcomes: What became of each tensor.
        is_map_known: Whether the map, if there is one, comes from somebody who knows the names, not from equal values.
    """
    of_map = {id(pair) for _, pair in outcomes if pair.is_mapped and is_map_known}
    both = [(outcome, pair) for outcome, pair in outcomes if _has_plain_sides(pair) and id(pair) not in of_map]
    renamed = {id(pair) for outcome, pair in both if outcome.verdict == "equal" and _names(pair)[0] != _names(pair)[1]}
    same = sum(_names(pair)[0] == _names(pair)[1] for _, pair in both)
    if len(renamed) >= same:
        return outcomes
    return [(_as_renamed(outcome, pair, same) if id(pair) in renamed else outcome, pair) for outcome, pair in outcomes]


def _has_plain_sides(pair: Pair) -> bool:
    return not any(side is None or isinstance(side, MappedTensor) for side in pair.sides)


def _names(pair: Pair) -> tuple[str, str]:
    first, second = pair.both
    return first.name, second.name


def _as_renamed(outcome: Outcome, pair: Pair, same: int) -> Outcome:
    lost, new = map(printable, changed_words(*_names(pair)))
    has = f"{new} in its name" if not lost else f"{new} in the place of {lost}" if new else f"no {lost} in its name"
    why = f"equal, but the second has {has}; {counted(same, 'other name')} {'is' if same == 1 else 'are'} the same"
    is_wrapper = bool(lost or new) and {word for word in f"{lost}{new}".split(".") if word} <= OF_LIBRARIES
    return outcome.became("renamed", why, RenamedInPart(lost or new, is_wrapper))


def rename_notes(pairs: Iterable[Pair]) -> list[str]:
    """Say what most names have more on one side, if most names differ by the same words."""
    names = [_names(pair) for pair in pairs if _has_plain_sides(pair)]
    changes = Counter(changed_words(*both) for both in names if both[0] != both[1])
    if not changes:
        return []
    (lost, new), count = changes.most_common(1)[0]
    if (lost and new) or 2 * count <= len(names):
        return []
    has = f"the second has {printable(new)}" if new else f"the first has {printable(lost)}"
    compared = f"{counted(len(names), 'name')} by which tensors are compared"
    return [f"names: {has} in {count:,} of {compared}; a load by name needs equal names"]
