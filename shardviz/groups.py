"""Things in groups, and groups of one thing."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

Key = TypeVar("Key")
Thing = TypeVar("Thing")
Node = TypeVar("Node", bound=Hashable)


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


def walk(starts: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yield what is reached from some things, the nearest first, each once.

    Example:
        >>> list(walk([1], lambda number: [2 * number, 2 * number + 1] if number < 4 else []))
        [1, 2, 3, 4, 5, 6, 7]
    """
    waiting = list(starts)
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop(0)
        if node not in seen:
            seen.add(node)
            yield node
            waiting += onward(node)


def the_only(things: Collection[Thing]) -> Thing | None:
    """Return the one thing of a group; None if it has none, or several.

    Example:
        >>> the_only({3}), the_only([]), the_only("ab")
        (3, None, None)
    """
    return next(iter(things)) if len(things) == 1 else None
