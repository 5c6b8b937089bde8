"""What was found by content as the lines of a map: one for all layers, and for a module whose names go on alike."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.checkpoint.by_content.numbered import NUMBER
from shardviz.checkpoint.maps.language import parse_rules
from shardviz.checkpoint.maps.named import pattern_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from shardviz.checkpoint.by_content.numbered import Family
    from shardviz.checkpoint.by_content.solving import Recipe
    from shardviz.checkpoint.maps.language import Rule

MOST_LINES = 2048
"""Lines that are made shorter."""

SOURCE = "the map that was inferred"


@dataclass(frozen=True)
class Choice:
    """What a family of tensors is found to be made of.

    Attributes:
        side: Which checkpoint has it: 0 or 1.
        whole: The family.
        recipe: How its tensors are made of the other side's.
        why: Why, if it is not because the values are equal.
    """

    side: int
    whole: Family
    recipe: Recipe
    why: str = ""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield its lines of a map: one, or if numbers differ, one for each tensor."""
        if all(link.is_direct for link in self.recipe.links):
            yield self.whole.pattern, self.recipe.text()
            return
        for numbers, tensor in sorted(self.whole.members.items()):
            if all(numbers in link.parts for link in self.recipe.links):
                yield tensor.name, self.recipe.text(numbers)


@dataclass(frozen=True, slots=True)
class Line:
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


def lines_of(choices: Iterable[Choice], sides: tuple[Collection[str], Collection[str]]) -> tuple[Line, ...]:
    """Return the lines of a map, the narrower patterns first where two fit one name.

    Args:
        choices: What was found.
        sides: All names of both checkpoints.
    """
    place = {name: at for at, name in enumerate([*sides[0], *sides[1]])}
    in_order = sorted(choices, key=lambda choice: min(place[one.name] for one in choice.whole.members.values()))
    every = [Line(left, right, choice.why) for choice in in_order for left, right in choice.lines()]
    if len(every) > MOST_LINES:
        return tuple(every)
    if not any(re.search(NUMBER, name) for line in every for name in (line.left, line.right)):
        sides = tuple({NUMBER.sub("0", name) for name in names} for names in sides)  # type: ignore[assignment]
    shortened = _shortened(every, sides)
    fits = Counter(
        name for line in shortened for side in sides for name in side if pattern_of(line.left).fullmatch(name)
    )
    if max(fits.values(), default=0) > 1:
        shortened.sort(key=lambda line: -line.left.count("."))
    return tuple(shortened)


def rules_from(lines: Iterable[Line]) -> tuple[Rule, ...]:
    """Return the rules of lines."""
    return parse_rules("\n".join(f"{line.left} = {line.right}" for line in lines), SOURCE)


def _shortened(every: list[Line], sides: tuple[Collection[str], Collection[str]]) -> list[Line]:
    """Put lines together that only rename, and whose names end alike: `blocks.*.ffn.* = layers.*.mlp.*`."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in every:
        for ends in _ends(line):
            groups.setdefault(ends, []).append(line)
    replaced: dict[Line, Line] = {}
    for (left, right), some in sorted(groups.items(), key=lambda item: item[0][0].count(".")):
        if len(some) > 1 and not any(line in replaced for line in some) and _are_all(left, right, some, sides):
            replaced |= dict.fromkeys(some, Line(left, right))
    return list(dict.fromkeys(replaced.get(line, line) for line in every))


def _ends(line: Line) -> list[tuple[str, str]]:
    """Return the patterns that a line is of if the last words of its names, which are the same, become one `*`."""
    if "(" in line.right or line.why:
        return []
    mine, theirs = line.left.split("."), line.right.split(".")
    patterns = []
    for count in range(1, min(len(mine), len(theirs))):
        if mine[-count:] != theirs[-count:]:
            break
        patterns.append((".".join([*mine[:-count], "*"]), ".".join([*theirs[:-count], "*"])))
    return patterns


def _are_all(left: str, right: str, lines: list[Line], sides: tuple[Collection[str], Collection[str]]) -> bool:
    """Whether the names that two patterns fit are those of some lines, and no others."""
    for pattern, own in ((left, [line.left for line in lines]), (right, [line.right for line in lines])):
        each = [pattern_of(one) for one in own]
        fit = [name for side in sides for name in side if pattern_of(pattern).fullmatch(name)]
        if any(not any(one.fullmatch(name) for one in each) for name in fit):
            return False
    return True
