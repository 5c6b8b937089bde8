"""Things in groups, in the order in which each group is first met."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

Key = TypeVar("Key")
Thing = TypeVar("Thing")


def in_groups(pairs: Iterable[tuple[Key, Thing]]) -> dict[Key, list[Thing]]:
    """Return the second things of pairs, grouped by the first.

    Example:
        >>> in_groups([("even", 2), ("odd", 3), ("even", 4)])
        {'even': [2, 4], 'odd': [3]}
    """
    groups: dict[Key, list[Thing]] = {}
    for key, thing in pairs:
        groups.setdefault(key, []).append(thing)
    return groups
