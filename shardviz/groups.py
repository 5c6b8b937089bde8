"""Things in groups, and groups of one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

Key = TypeVar("Key")
Thing = TypeVar("Thing")


def in_groups(pairs: Iterable[tuple[Key, Thing]]) -> dict[Key, list[Thing]]:
    """Return the second things of pairs, grouped by the first, in the order in which each group is first met.

    Example:
        >>> in_groups([("even", 2), ("odd", 3), ("even", 4)])
        {'even': [2, 4], 'odd': [3]}
    """
    groups: dict[Key, list[Thing]] = {}
    for key, thing in pairs:
        groups.setdefault(key, []).append(thing)
    return groups


def the_only(things: Collection[Thing]) -> Thing | None:
    """Return the one thing of a group; None if it has none, or several.

    Example:
        >>> the_only({3}), the_only([]), the_only("ab")
        (3, None, None)
    """
    return next(iter(things)) if len(things) == 1 else None
