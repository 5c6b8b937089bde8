"""Which tensors each rule of a map is about: patterns fitted to the names of two checkpoints, in either direction."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from shardviz.checkpoint.maps.language import NOTHING, Call, Expression, Name, names_in
from shardviz.checkpoint.maps.made import Made, Op
from shardviz.checkpoint.maps.named import Named, filled, pattern_of
from shardviz.checkpoint.maps.views import MisfitError
from shardviz.errors import ShardvizError
from shardviz.text import did_you_mean, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.maps.made import Node
    from shardviz.checkpoint.tensor import Tensor

MAX_PARTS = 1 << 16
"""Tensors that one is made of."""

Numbers: TypeAlias = "Mapping[str, int]"


class LackingError(LookupError):
    """A tensor that an expression names and that is not there: the text is its name."""


def has_some(expression: Expression, groups: Sequence[str], right: Named) -> bool:
    """Whether some of what an expression names is there."""
    return any(
        any(map(pattern_of(filled(pattern, groups)).fullmatch, right.tensors)) for pattern in names_in(expression)
    )


def node_of(expression: Expression, groups: Sequence[str], right: Named, numbers: Numbers) -> Node:
    """Return the tensors that an expression names, for the words that a name has in the place of its stars.

    Raises:
        LackingError: One of them is not there.
        MisfitError: A number is not one.
    """
    if isinstance(expression, Name):
        name = filled(expression.pattern, groups)
        if name not in right.tensors:
            raise LackingError(name)
        found: Tensor = right.tensors[name]
        return found
    operands = _enumerated(expression, groups, right)
    parts = tuple(node_of(operand, words, right, numbers) for operand, words in operands)
    stars = max((one.count("*") for one in names_in(expression.operands[0])), default=0)
    return Op(expression.function, parts, tuple(_value(one, groups[stars:], numbers) for one in expression.numbers))


def _enumerated(call: Call, groups: Sequence[str], right: Named) -> list[tuple[Expression, Sequence[str]]]:
    """Return the operands with the words for their stars: of one that has more stars, one for each number there is."""
    operand = call.operands[0]
    free = max((one.count("*") for one in names_in(operand)), default=0) - len(groups)
    if len(call.operands) > 1 or call.function not in ("cat", "stack") or free <= _takers(operand):
        return [(one, groups) for one in call.operands]
    return [(operand, (*groups, str(number))) for number in _numbers_of(operand, groups, right)]


def _takers(expression: Expression) -> int:
    """Return how many functions within an expression stand for one operand for each number."""
    if isinstance(expression, Name):
        return 0
    own = expression.function in ("cat", "stack") and len(expression.operands) == 1
    return own + max(_takers(operand) for operand in expression.operands)


def _numbers_of(operand: Expression, groups: Sequence[str], right: Named) -> range:
    """Return the numbers that the first free star stands for: from 0, in order.

    Raises:
        LackingError: There are none, or one is left out.
    """
    numbers: set[int] = set()
    for pattern in names_in(operand):
        begin = filled(pattern, groups)
        numbers |= right.numbers_after(begin) if "*" in begin else set()
    if not numbers or max(numbers) + 1 != len(numbers) or len(numbers) > MAX_PARTS:
        lost = next((number for number in range(MAX_PARTS) if number not in numbers), 0)
        first = next(one for one in names_in(operand) if one.count("*") > len(groups))
        raise LackingError(filled(first, (*groups, str(lost))))
    return range(len(numbers))


def _value(number: int | str, groups: Sequence[str], numbers: Numbers) -> int:
    if isinstance(number, int):
        return number
    if number in numbers:
        return numbers[number]
    if number == "*" and groups and re.fullmatch("[0-9]{1,15}", groups[0]):
        return int(groups[0])
    raise MisfitError(f"{number} stands for no number here")


@dataclass(frozen=True)
class Mapped:
    """What a map says of two sets of tensors.

    Attributes:
        known_as: What the right side calls a tensor of the left one, where it was only renamed.
        made: What a tensor of the left side is made of.
        lacking: Tensors that cannot be made, and why.
        left_alone: Names of the left side that the right one need not have.
        right_alone: And the other way round.
    """

    known_as: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, Made] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    left_alone: frozenset[str] = frozenset()
    right_alone: frozenset[str] = frozenset()


def is_turned(rule: Rule, first: Collection[str], second: Collection[str]) -> bool:
    """Whether a rule makes tensors of the second side from those of the first: its names say so."""
    if rule.left == NOTHING:
        return not _fits(rule, second) and _fits(rule, first)
    own, others = (any(map(pattern_of(rule.left).fullmatch, names)) for names in (first, second))
    if own == others:
        return not _fits(rule, second) and _fits(rule, first)
    return others


def _fits(rule: Rule, names: Collection[str]) -> bool:
    """Whether everything that the right side of a rule names is among some names."""
    return all(any(map(pattern_of(one).fullmatch, names)) for one in names_in(rule.right))


def apply(rules: Sequence[Rule], left: Named, right: Named, numbers: Numbers, *, strict: bool = True) -> Mapped:
    """Find the tensors that the rules are about.

    Args:
        rules: The map.
        left: The tensors that its left sides name.
        right: Those that its expressions name.
        numbers: What its variables stand for.
        strict: Whether a rule whose right side fits nothing is refused.

    Raises:
        ShardvizError: A rule fits nothing, though it is not optional, or its tensors do not fit each other.
    """
    work = _Work(right, numbers)
    for rule in rules:
        work.add(rule, left, strict=strict)
    return work.result(left)


@dataclass
class _Work:
    """What was found so far.

    Attributes:
        right: The tensors that expressions name.
        numbers: What variables stand for.
        rule_of: The rule that a name of the left side was found to be of.
    """

    right: Named
    numbers: Numbers
    rule_of: dict[str, Rule] = field(default_factory=dict)
    known_as: dict[str, str] = field(default_factory=dict)
    made: dict[str, Made] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    not_needed: set[str] = field(default_factory=set)

    def add(self, rule: Rule, left: Named, *, strict: bool) -> None:
        """Apply one rule to all names that it fits and that no rule before it took."""
        if rule.left == NOTHING:
            self._add_not_needed(rule)
            return
        fit = {name: match for name in left.tensors if (match := pattern_of(rule.left).fullmatch(name))}
        free = {name: match for name, match in fit.items() if self._is_free(name)}
        if not free and not rule.optional:
            self._refuse_unused(rule, left, fit)
        if strict and not rule.optional:
            self._refuse_unmatched(rule)
        errors: dict[str, str] = {}
        for name, match in free.items():
            self._add_one(rule, name, match.groups(), errors)
        if errors and len(errors) == len(free) and not rule.optional:
            raise ShardvizError(f"{rule.where}: {next(iter(errors.values()))}", f"the line is {_written(rule)}")
        self.lacking.update(errors)

    def _is_free(self, name: str) -> bool:
        """Whether no rule has taken a name, or only an optional one that lacks some of what it names."""
        return name not in self.rule_of or (self.rule_of[name].optional and name in self.lacking)

    def _add_one(self, rule: Rule, name: str, groups: tuple[str, ...], errors: dict[str, str]) -> None:
        """Apply a rule to a name; an optional one whose tensors are missing leaves it to other rules."""
        if rule.right is None:
            self.rule_of[name] = rule
            self.alone.add(name)
            return
        try:
            node = node_of(rule.right, groups, self.right, self.numbers)
            made = Made(node, node.shape, str(rule.right), rule.where) if isinstance(node, Op) else node
        except LackingError as error:
            if rule.optional and (name in self.rule_of or not has_some(rule.right, groups, self.right)):
                return
            self.rule_of[name] = rule
            if isinstance(rule.right, Name):
                self.known_as[name] = filled(rule.right.pattern, groups)
            else:
                self.lacking[name] = f"it is made of {rule.right}, and there is no {printable(str(error))}"
        except MisfitError as error:
            self.rule_of[name] = rule
            errors[name] = str(error)
        else:
            self.lacking.pop(name, None)
            self.rule_of[name] = rule
            if isinstance(made, Made):
                self.made[name] = made
            else:
                self.known_as[name] = made.name

    def _add_not_needed(self, rule: Rule) -> None:
        for pattern in names_in(rule.right):
            self.not_needed |= {name for name in self.right.tensors if pattern_of(pattern).fullmatch(name)}

    def _refuse_unused(self, rule: Rule, left: Named, fit: Collection[str]) -> None:
        if fit:
            other = self.rule_of[next(iter(fit))].where
            what = f"every tensor that fits {printable(rule.left)} is taken by {other}"
            raise ShardvizError(f"{rule.where}: {what}", "put the narrower pattern first, or leave one out")
        hint = (
            did_you_mean(rule.left, left.numbered if "*" in rule.left else left.tensors)
            or f"the names are like {printable(next(iter(left.tensors), ''))}"
        )
        raise ShardvizError(
            f"{rule.where}: no tensor of {left.path} fits {printable(rule.left)}",
            f"{hint}{'' if hint.endswith('?') else '.'} Write {printable(rule.left)} ?= ... if it may be missing",
        )

    def _refuse_unmatched(self, rule: Rule) -> None:
        for pattern in names_in(rule.right):
            if not any(map(pattern_of(pattern).fullmatch, self.right.tensors)):
                hint = did_you_mean(pattern, self.right.numbered if "*" in pattern else self.right.tensors)
                raise ShardvizError(
                    f"{rule.where}: no tensor of {self.right.path} fits {printable(pattern)}",
                    hint or f"write {printable(rule.left)} ?= ... if it may be missing",
                )

    def result(self, left: Named) -> Mapped:
        """Return what was found, by full names."""
        full = left.full
        return Mapped(
            {full[name]: other for name, other in self.known_as.items()},
            {full[name]: one for name, one in self.made.items()},
            {full[name]: why for name, why in self.lacking.items() if name not in self.made},
            frozenset(full[name] for name in self.alone),
            frozenset(self.right.full[name] for name in self.not_needed),
        )


def _written(rule: Rule) -> str:
    return printable(f"{rule.left} = {rule.right}")
