"""Tensors that differ by the numbers in their names, such as those of layers, and which of them belong together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardviz.checkpoint.tensor import Tensor

NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")
MOST_EXTRA = 2
"""Numbers that become dims: those of layers and of experts."""

REPRESENTATIVES = 5
"""Tensors of a family that are looked at."""

Numbers: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Family:
    """Tensors of one shape whose names differ by their numbers.

    Attributes:
        pattern: Their name with `*` for each number; a name where it is a single one.
        members: The tensors, by their numbers.
    """

    pattern: str
    members: Mapping[Numbers, Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each."""
        return next(iter(self.members.values())).shape

    @property
    def some(self) -> list[Numbers]:
        """The numbers of a few members: the first, the last, and some between."""
        every = sorted(self.members)
        last = len(every) - 1
        return [every[at] for at in sorted({last * step // (REPRESENTATIVES - 1) for step in range(REPRESENTATIVES)})]

    def alone(self) -> Iterator[Family]:
        """Yield each member as a family of its own."""
        for tensor in self.members.values():
            yield Family(tensor.name, {(): tensor})


def families_of(tensors: Iterable[Tensor]) -> list[Family]:
    """Return families; tensors whose shapes differ, though only their numbers do, are by themselves."""
    by_pattern: dict[str, dict[Numbers, Tensor]] = {}
    for tensor in tensors:
        numbers = tuple(map(int, NUMBER.findall(tensor.name)))
        by_pattern.setdefault(NUMBER.sub("*", tensor.name), {})[numbers] = tensor
    families: list[Family] = []
    for pattern, members in by_pattern.items():
        whole = Family(pattern, members)
        is_one = len({one.shape for one in members.values()}) == 1
        families += [whole] if is_one else whole.alone()
    return families


@dataclass(frozen=True, eq=False)
class Link:
    """Which tensors of one family belong to each of another.

    Attributes:
        family: The family that they are of.
        parts: By the numbers of the other family: the tensors by the numbers that only this family has.
        numbers: By the numbers of the other family: the numbers that stand in their place.
        extra: Which of this family's numbers only this family has.
    """

    family: Family
    parts: Mapping[Numbers, Mapping[Numbers, Tensor]] = field(repr=False)
    numbers: Mapping[Numbers, Numbers]
    extra: tuple[int, ...] = ()

    @property
    def is_direct(self) -> bool:
        """Whether the same numbers stand on both sides, before those that only one has: a `*` says it."""
        stars = self.family.pattern.count("*")
        is_same = all(one == other for one, other in self.numbers.items())
        return is_same and self.extra == tuple(range(stars - len(self.extra), stars))

    def name(self, numbers: Numbers | None) -> str:
        """Return the pattern of its tensors: with `*` for all numbers, or for those that only it has."""
        if numbers is None:
            return self.family.pattern
        words = iter(map(str, self.numbers[numbers]))
        pieces = self.family.pattern.split("*")
        put = ["*" if at in self.extra else next(words) for at in range(len(pieces) - 1)]
        return "".join(piece + word for piece, word in zip(pieces, [*put, ""], strict=True))


def links(whole: Family, part: Family) -> Iterator[Link]:
    """Yield the ways in which the numbers of a family belong to those of another one."""
    stars, others = whole.pattern.count("*"), part.pattern.count("*")
    more = others - stars
    if 0 <= more <= MOST_EXTRA:
        for extra in sorted(combinations(range(others), more), reverse=True):
            parts: dict[Numbers, dict[Numbers, Tensor]] = {}
            for numbers, tensor in part.members.items():
                shared = tuple(number for at, number in enumerate(numbers) if at not in extra)
                parts.setdefault(shared, {})[tuple(numbers[at] for at in extra)] = tensor
            for known in _aligned(whole.members, parts):
                yield Link(part, {own: parts[other] for own, other in known.items()}, known, extra)
    if more and len(whole.members) == len(part.members):
        known = dict(zip(sorted(whole.members), sorted(part.members), strict=True))
        yield Link(part, {own: {(): part.members[other]} for own, other in known.items()}, known)


def _aligned(numbers_of_side: Iterable[Numbers], others: Iterable[Numbers]) -> Iterator[dict[Numbers, Numbers]]:
    """Yield which numbers may be which: the same ones; if those of one side begin elsewhere, first in their order."""
    mine, theirs = sorted(numbers_of_side), sorted(others)
    if mine != theirs and len(mine) == len(theirs):
        columns = [_column(*pair) for pair in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True)]
        known = {numbers: tuple(columns[at].get(one, -1) for at, one in enumerate(numbers)) for numbers in mine}
        if sorted(known.values()) == theirs:
            yield known
    if shared := set(mine) & set(theirs):
        yield {numbers: numbers for numbers in sorted(shared)}


def _column(mine: Iterable[int], theirs: Iterable[int]) -> dict[int, int]:
    return dict(zip(sorted(set(mine)), sorted(set(theirs)), strict=False))
