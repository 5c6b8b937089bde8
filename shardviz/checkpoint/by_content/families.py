"""Families of tensors whose names differ only in their numbers, and map lines for them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.maps.matching import NUMBER, pattern_of
from shardviz.groups import in_groups

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from shardviz.checkpoint.by_content.solving import Recipe
    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.records import Tensor

MOST_EXTRA = 2
"""Numbers that become dims: those of layers and of experts."""

REPRESENTATIVES = 5
"""Tensors of a family that are looked at."""

Numbers: TypeAlias = tuple[int, ...]
MOST_LINES = 2048
"""Lines that are made shorter."""

FUNCTION = re.compile(r"(\w+)\(")
"""A function's name in a line of a map."""

SOURCE = "the map that was inferred"


@dataclass(frozen=True, eq=False)
class Family:
    """Tensors of one shape whose names differ by their numbers.

    Attributes:
        pattern: Their name with `*` for each number; a name if it is a single one.
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
    """Group tensors into families; one whose shape differs from its family's is alone."""
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
    """Matches each tensor of one family with the tensors of another family that belong to it.

    Attributes:
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
        """Whether both sides have the same numbers, so that a plain `*` can say it."""
        stars = self.family.pattern.count("*")
        is_same = all(one == other for one, other in self.numbers.items())
        return is_same and self.extra == tuple(range(stars - len(self.extra), stars))

    def name(self, numbers: Numbers | None) -> str:
        """Return the pattern with its numbers filled in; `*` for numbers that only it has."""
        if numbers is None:
            return self.family.pattern
        words = iter(map(str, self.numbers[numbers]))
        pieces = self.family.pattern.split("*")
        put = ["*" if at in self.extra else next(words) for at in range(len(pieces) - 1)]
        return "".join(piece + word for piece, word in zip(pieces, [*put, ""], strict=True))


def links(whole: Family, segment: Family) -> Iterator[Link]:
    """Yield the ways in which the numbers of a family belong to those of another one."""
    stars, others = whole.pattern.count("*"), segment.pattern.count("*")
    more = others - stars
    if 0 <= more <= MOST_EXTRA:
        for extra in sorted(combinations(range(others), more), reverse=True):
            parts: dict[Numbers, dict[Numbers, Tensor]] = {}
            for numbers, tensor in segment.members.items():
                shared = tuple(number for at, number in enumerate(numbers) if at not in extra)
                parts.setdefault(shared, {})[tuple(numbers[at] for at in extra)] = tensor
            for numbers_there in _number_pairings(whole.members, parts):
                yield Link(segment, {own: parts[other] for own, other in numbers_there.items()}, numbers_there, extra)
    if more and len(whole.members) == len(segment.members):
        numbers_there = dict(zip(sorted(whole.members), sorted(segment.members), strict=True))
        yield Link(segment, {own: {(): segment.members[other]} for own, other in numbers_there.items()}, numbers_there)


def _number_pairings(numbers_of_side: Iterable[Numbers], others: Iterable[Numbers]) -> Iterator[dict[Numbers, Numbers]]:
    """Yield pairings of numbers: in order if one side starts elsewhere, then equal ones."""
    own_numbers, their_numbers = sorted(numbers_of_side), sorted(others)
    if own_numbers != their_numbers and len(own_numbers) == len(their_numbers):
        pairs = zip(zip(*own_numbers, strict=True), zip(*their_numbers, strict=True), strict=True)
        columns = [dict(zip(sorted({*own}), sorted({*other}), strict=False)) for own, other in pairs]
        shifted = {
            numbers: tuple(columns[at].get(one, -1) for at, one in enumerate(numbers)) for numbers in own_numbers
        }
        if sorted(shifted.values()) == their_numbers:
            yield shifted
    if shared := set(own_numbers) & set(their_numbers):
        yield {numbers: numbers for numbers in sorted(shared)}


@dataclass(frozen=True)
class FamilyMatch:
    """A family of tensors, and the recipe that makes it from the other side.

    Attributes:
        side: Which checkpoint has it: 0 or 1.
        recipe: How its tensors are made of the other side's.
        why: Why, if it is not because the values are equal.
        is_by_settings: Whether a model's settings say in which order its parts are joined.
    """

    side: int
    whole: Family
    recipe: Recipe
    why: str = ""
    is_by_settings: bool = False

    @property
    def functions(self) -> list[str]:
        """The functions of the recipe whose order the values alone suggest."""
        return [] if self.is_by_settings else FUNCTION.findall(self.recipe.text())

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield its lines of a map: one, or if numbers differ, one for each tensor."""
        if all(link.is_direct for link in self.recipe.links):
            yield self.whole.pattern, self.recipe.text()
            return
        for numbers, tensor in sorted(self.whole.members.items()):
            if all(numbers in link.parts for link in self.recipe.links):
                yield tensor.name, self.recipe.text(numbers)


@dataclass(frozen=True, slots=True)
class MapLine:
    """One line of a map.

    Attributes:
        left: The pattern of its tensors.
        right: How they are made.
        why: Why, if it is not because the values are equal.
    """

    left: str
    right: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.left} = {self.right}" + (f"  # {self.why}" if self.why else "")


def lines_of(choices: Iterable[FamilyMatch], sides: tuple[Collection[str], Collection[str]]) -> tuple[MapLine, ...]:
    """Return the lines of a map, the narrower patterns first if two fit one name.

    Args:
        sides: All names of both checkpoints.
    """
    place = {name: at for at, name in enumerate([*sides[0], *sides[1]])}
    in_order = sorted(choices, key=lambda choice: min(place[one.name] for one in choice.whole.members.values()))
    every = [MapLine(left, right, choice.why) for choice in in_order for left, right in choice.lines()]
    if len(every) > MOST_LINES:
        return tuple(every)
    if not any(re.search(NUMBER, name) for line in every for name in (line.left, line.right)):
        sides = tuple({NUMBER.sub("0", name) for name in names} for names in sides)  # type: ignore[assignment]
    shortened = _merge_renames(every, sides)
    fits = Counter(
        name for line in shortened for side in sides for name in side if pattern_of(line.left).fullmatch(name)
    )
    if max(fits.values(), default=0) > 1:
        shortened.sort(key=lambda line: -line.left.count("."))
    return tuple(shortened)


def rules_from(lines: Iterable[MapLine]) -> tuple[Rule, ...]:
    """Return the rules of lines."""
    return parse_rules("\n".join(f"{line.left} = {line.right}" for line in lines), SOURCE)


def _merge_renames(every: list[MapLine], sides: tuple[Collection[str], Collection[str]]) -> list[MapLine]:
    """Merge lines that only rename and whose names end alike: `blocks.*.ffn.* = layers.*.mlp.*`."""
    groups = in_groups((ends, line) for line in every for ends in _suffix_patterns(line))
    replaced: dict[MapLine, MapLine] = {}
    for (left_pattern, right), some in sorted(groups.items(), key=lambda item: item[0][0].count(".")):
        if (
            len(some) > 1
            and not any(line in replaced for line in some)
            and _covers_only(left_pattern, right, some, sides)
        ):
            replaced |= dict.fromkeys(some, MapLine(left_pattern, right))
    return list(dict.fromkeys(replaced.get(line, line) for line in every))


def _suffix_patterns(line: MapLine) -> list[tuple[str, str]]:
    """Return a line's patterns with its names' common last words replaced by one `*`."""
    if "(" in line.right or line.why:
        return []
    left_words, right_words = line.left.split("."), line.right.split(".")
    patterns = []
    for count in range(1, min(len(left_words), len(right_words))):
        if left_words[-count:] != right_words[-count:]:
            break
        patterns.append((".".join([*left_words[:-count], "*"]), ".".join([*right_words[:-count], "*"])))
    return patterns


def _covers_only(
    left_pattern: str, right: str, lines: list[MapLine], sides: tuple[Collection[str], Collection[str]]
) -> bool:
    """Whether the names that two patterns fit are those of some lines, and no others."""
    for pattern, names in ((left_pattern, [line.left for line in lines]), (right, [line.right for line in lines])):
        each = [pattern_of(one) for one in names]
        fit = [name for side in sides for name in side if pattern_of(pattern).fullmatch(name)]
        if any(not any(one.fullmatch(name) for one in each) for name in fit):
            return False
    return True
