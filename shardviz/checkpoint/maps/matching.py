"""Match the rules of a map with the names of two checkpoints, in either direction.

What stands before all names of a checkpoint, such as `app.model.` in a folder of DCP, does not have to be in the map.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from shardviz.checkpoint.maps.functions import INVERSE, MapArgumentError
from shardviz.checkpoint.maps.language import NOTHING, Call, Expression, Name, Rule, names_in
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, Op
from shardviz.errors import ShardvizError
from shardviz.text import did_you_mean, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardviz.checkpoint.maps.mapped_tensors import Node
    from shardviz.checkpoint.records import Tensor

SAMPLE = 512
"""Names that are looked at for what stands before all of them."""

NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")
"""A number between the dots of a name, such as that of a layer."""
MAX_PARTS = 1 << 16
"""Tensors that one is made of."""

Numbers: TypeAlias = "Mapping[str, int]"


@dataclass(frozen=True)
class NamedTensors:
    """A checkpoint's tensors by name, without the prefix of all names.

    Attributes:
        path: What the checkpoint is called in messages.
        tensors: Its tensors by the names that maps have for them; for a left side, anything by those names.
        full: Their names.
    """

    path: str
    tensors: Mapping[str, Any]
    full: Mapping[str, str]

    @cached_property
    def numbered(self) -> Mapping[str, set[tuple[int, ...]]]:
        """The numbers in its names, by the names with `*` for each of them."""
        numbers: dict[str, set[tuple[int, ...]]] = {}
        for name in self.tensors:
            numbers.setdefault(NUMBER.sub("*", name), set()).add(tuple(map(int, NUMBER.findall(name))))
        return numbers

    @cached_property
    def _after(self) -> dict[tuple[str, int], dict[tuple[int, ...], set[int]]]:
        return {}

    def numbers_after(self, pattern: str) -> set[int]:
        """Return the numbers that names have in the place of a pattern's first `*`."""
        starred = NUMBER.sub("*", pattern)
        before = tuple(map(int, NUMBER.findall(pattern.partition("*")[0])))
        key = starred, len(before)
        if key not in self._after:
            numbers_by_prefix: dict[tuple[int, ...], set[int]] = {}
            for numbers in self.numbered.get(starred, ()):
                numbers_by_prefix.setdefault(numbers[: len(before)], set()).add(numbers[len(before)])
            self._after[key] = numbers_by_prefix
        return self._after[key].get(before, set())


@lru_cache(maxsize=4096)
def pattern_of(text: str) -> re.Pattern[str]:
    """Return the expression that fits what a pattern with `*` fits."""
    return re.compile("(.*?)".join(map(re.escape, text.split("*"))))


def fill_stars(pattern: str, words: Sequence[str]) -> str:
    """Return a pattern with words for its first stars.

    Example:
        >>> fill_stars("layers.*.experts.*.w1", ["3"])
        'layers.3.experts.*.w1'
    """
    pieces = pattern.split("*")
    put = [*words, *["*"] * len(pieces)][: len(pieces) - 1]
    return "".join(piece + word for piece, word in zip(pieces, [*put, ""], strict=True))


def named_tensors(path: str, tensors: Mapping[str, Any], patterns: Collection[str]) -> NamedTensors:
    """Return tensors by name, without the prefix that makes most of them fit a map's patterns."""
    before = _beginning(tensors, patterns)
    full = {name.removeprefix(before): name for name in tensors if name.startswith(before)}
    return NamedTensors(path, {short: tensors[name] for short, name in full.items()}, full)


def _beginning(names: Collection[str], patterns: Collection[str]) -> str:
    used_patterns = [pattern for pattern in patterns if pattern != NOTHING]
    if not used_patterns or not names:
        return ""
    either = "|".join(f"(?:{pattern_of(pattern).pattern})" for pattern in used_patterns)
    whole = re.compile(either)
    some = list(names)[:: max(1, len(names) // SAMPLE)]
    if any(whole.fullmatch(name) for name in names):
        return ""
    behind = re.compile(f"((?:[^.*]+[.])+?)(?:{either})")
    counts = Counter(match[1] for name in some if (match := behind.fullmatch(name)))
    best = [before for before, count in counts.most_common(2) if not re.search(r"(?:^|\.)[0-9]+\.", before)]
    return best[0] if best else ""


class MissingTensorError(LookupError):
    """An expression names a tensor that doesn't exist; the text is its name."""


def has_some(expression: Expression, groups: Sequence[str], right: NamedTensors) -> bool:
    """Whether any tensor that an expression names is there."""
    return any(
        any(map(pattern_of(fill_stars(pattern, groups)).fullmatch, right.tensors)) for pattern in names_in(expression)
    )


def node_of(expression: Expression, groups: Sequence[str], right: NamedTensors, numbers: Numbers) -> Node:
    """Return the tensors that an expression names, with its stars filled in.

    Raises:
        MissingTensorError: One of them is not there.
        MapArgumentError: A number is not one.
    """
    if isinstance(expression, Name):
        name = fill_stars(expression.pattern, groups)
        if name not in right.tensors:
            raise MissingTensorError(name)
        tensor: Tensor = right.tensors[name]
        return tensor
    operands = _numbered_operands(expression, groups, right)
    parts = tuple(node_of(operand, words, right, numbers) for operand, words in operands)
    stars = max((one.count("*") for one in names_in(expression.operands[0])), default=0)
    return Op(expression.function, parts, tuple(_value(one, groups[stars:], numbers) for one in expression.numbers))


def _numbered_operands(
    call: Call, groups: Sequence[str], right: NamedTensors
) -> list[tuple[Expression, Sequence[str]]]:
    """Return the operands with words for their stars; a further star takes every number it fits."""
    operand = call.operands[0]
    free = max((one.count("*") for one in names_in(operand)), default=0) - len(groups)
    if len(call.operands) > 1 or call.function not in ("cat", "stack") or free <= _count_takers(operand):
        return [(one, groups) for one in call.operands]
    return [(operand, (*groups, str(number))) for number in _numbers_of(operand, groups, right)]


def _count_takers(expression: Expression) -> int:
    """Return how many functions within an expression stand for one operand for each number."""
    if isinstance(expression, Name):
        return 0
    takes_all = expression.function in ("cat", "stack") and len(expression.operands) == 1
    return takes_all + max(_count_takers(operand) for operand in expression.operands)


def _numbers_of(operand: Expression, groups: Sequence[str], right: NamedTensors) -> range:
    """Return the numbers that the first free star stands for: from 0, in order.

    Raises:
        MissingTensorError: There are none, or one is left out.
    """
    numbers: set[int] = set()
    for pattern in names_in(operand):
        begin = fill_stars(pattern, groups)
        numbers |= right.numbers_after(begin) if "*" in begin else set()
    if not numbers or max(numbers) + 1 != len(numbers) or len(numbers) > MAX_PARTS:
        lost = next((number for number in range(MAX_PARTS) if number not in numbers), 0)
        first = next(one for one in names_in(operand) if one.count("*") > len(groups))
        raise MissingTensorError(fill_stars(first, (*groups, str(lost))))
    return range(len(numbers))


def _value(number: int | str, groups: Sequence[str], numbers: Numbers) -> int:
    if isinstance(number, int):
        return number
    if number in numbers:
        return numbers[number]
    if number == "*" and groups and re.fullmatch("[0-9]{1,15}", groups[0]):
        return int(groups[0])
    raise MapArgumentError(f"{number} has no value here")


@dataclass(frozen=True)
class MapResult:
    """The result of applying a map to two sets of tensors.

    Attributes:
        known_as: What the right side calls a tensor of the left one, where it was only renamed.
        made: What a tensor of the left side is made of.
        lacking: Tensors that cannot be made, and why.
        left_alone: Names of the left side that the right one need not have.
        right_alone: And the other way round.
    """

    known_as: Mapping[str, str]
    made: Mapping[str, MappedTensor]
    lacking: Mapping[str, str]
    left_alone: frozenset[str]
    right_alone: frozenset[str]


def is_turned(rule: Rule, first: Collection[str], second: Collection[str]) -> bool:
    """Whether a rule makes tensors of the second side from those of the first: its names say so."""
    if rule.left == NOTHING:
        return not _has_sources(rule, second) and _has_sources(rule, first)
    fits_first, others = (any(map(pattern_of(rule.left).fullmatch, names)) for names in (first, second))
    if fits_first == others:
        return not _has_sources(rule, second) and _has_sources(rule, first)
    return others


def _has_sources(rule: Rule, names: Collection[str]) -> bool:
    """Whether everything that the right side of a rule names is among some names."""
    return all(any(map(pattern_of(one).fullmatch, names)) for one in names_in(rule.right))


def apply(
    rules: Sequence[Rule], left: NamedTensors, right: NamedTensors, numbers: Numbers, *, strict: bool = True
) -> MapResult:
    """Find the tensors that the rules are about.

    Args:
        left: The tensors that its left sides name.
        right: Those that its expressions name.
        numbers: What its variables stand for.
        strict: Whether a rule whose right side fits nothing is refused.

    Raises:
        ShardvizError: A rule fits nothing, though it is not optional, or its tensors do not fit each other.
    """
    work = _RuleRun(right, numbers)
    for rule in rules:
        work.add(rule, left, strict=strict)
    return work.result(left)


@dataclass
class _RuleRun:
    """The result of the rules applied so far.

    Attributes:
        right: The tensors that expressions name.
        numbers: What variables stand for.
        rule_of: The rule that a name of the left side was found to be of.
    """

    right: NamedTensors
    numbers: Numbers
    rule_of: dict[str, Rule] = field(default_factory=dict)
    known_as: dict[str, str] = field(default_factory=dict)
    made: dict[str, MappedTensor] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    not_needed: set[str] = field(default_factory=set)

    def add(self, rule: Rule, left: NamedTensors, *, strict: bool) -> None:
        """Apply one rule to all names that it fits and that no rule before it took."""
        if rule.left == NOTHING:
            for pattern in names_in(rule.right):
                self.not_needed |= {name for name in self.right.tensors if pattern_of(pattern).fullmatch(name)}
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
            line = printable(f"{rule.left} = {rule.right}")
            raise ShardvizError(f"{rule.where}: {next(iter(errors.values()))}", f"the line is {line}")
        self.lacking.update(errors)

    def _is_free(self, name: str) -> bool:
        """Whether no rule has taken a name, or only an optional rule whose tensors are missing."""
        return name not in self.rule_of or (self.rule_of[name].optional and name in self.lacking)

    def _add_one(self, rule: Rule, name: str, groups: tuple[str, ...], errors: dict[str, str]) -> None:
        """Apply a rule to a name; an optional rule whose tensors are missing leaves it to others."""
        if rule.right is None:
            self.rule_of[name] = rule
            self.alone.add(name)
            return
        try:
            node = node_of(rule.right, groups, self.right, self.numbers)
            mapped = MappedTensor(node, node.shape, str(rule.right), rule.where) if isinstance(node, Op) else node
        except MissingTensorError as error:
            if rule.optional and (name in self.rule_of or not has_some(rule.right, groups, self.right)):
                return
            self.rule_of[name] = rule
            if isinstance(rule.right, Name):
                self.known_as[name] = fill_stars(rule.right.pattern, groups)
            else:
                self.lacking[name] = f"it is made of {rule.right}, and there is no {printable(str(error))}"
        except MapArgumentError as error:
            self.rule_of[name] = rule
            errors[name] = str(error)
        else:
            self.lacking.pop(name, None)
            self.rule_of[name] = rule
            if isinstance(mapped, MappedTensor):
                self.made[name] = mapped
            else:
                self.known_as[name] = mapped.name

    def _refuse_unused(self, rule: Rule, left: NamedTensors, fit: Collection[str]) -> None:
        if fit:
            earlier = self.rule_of[next(iter(fit))].where
            what = f"every tensor that fits {printable(rule.left)} is taken by {earlier}"
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

    def result(self, left: NamedTensors) -> MapResult:
        """Return what was found, by full names."""
        full = left.full
        return MapResult(
            {full[name]: other for name, other in self.known_as.items()},
            {full[name]: one for name, one in self.made.items()},
            {full[name]: why for name, why in self.lacking.items() if name not in self.made},
            frozenset(full[name] for name in self.alone),
            frozenset(self.right.full[name] for name in self.not_needed),
        )


def turn_rules(rules: Iterable[Rule], names: Collection[str], others: Collection[str]) -> list[Rule]:
    """Return rules with some names on their left; those with them on the right are inverted.

    Args:
        names: What is to be made, such as a model's names.
        others: What it is made of, such as a checkpoint's.
    """
    return [one for rule in rules for one in (invert(rule) if is_turned(rule, names, others) else [rule])]


def invert(rule: Rule) -> list[Rule]:
    """Return rules that make a rule's operands from its tensor; none if shapes are needed.

    Example:
        >>> from shardviz.checkpoint.maps.language import parse_rules
        >>> [str(one.right) for one in invert(parse_rules("gate_up = cat(w1, w3)", "my.map")[0])]
        ['split(gate_up, 2, 0, 0)', 'split(gate_up, 2, 1, 0)']
    """
    if rule.right is None or rule.left == NOTHING:
        return []
    stars = rule.left.count("*")
    operands = list(_parts(rule.right, Name(rule.left)))
    names = list(names_in(rule.right))
    if [leaf for leaf, _ in operands] != names or any(name.count("*") < stars for name in names):
        return []
    return [replace(rule, left=leaf, right=made) for leaf, made in operands]


def _parts(expression: Expression, whole: Expression) -> Iterator[tuple[str, Expression]]:
    """Yield each name in an expression with its part of the whole, if shapes don't matter."""
    if isinstance(expression, Name):
        yield expression.pattern, whole
        return
    for operand, own_part in zip(expression.operands, _own_parts(expression, whole), strict=False):
        yield from _parts(operand, own_part)


def _own_parts(call: Call, whole: Expression) -> list[Call]:
    count, numbers = len(call.operands), call.numbers
    dim = numbers[0] if numbers else 0
    if call.function in INVERSE:
        return [Call(INVERSE[call.function], (whole,), numbers)]
    if call.function == "transpose":
        return [Call("transpose", (whole,), numbers)]
    if call.function == "permute":
        dims = [number if isinstance(number, int) else 0 for number in numbers]
        return [Call("permute", (whole,), tuple(dims.index(at) for at in range(len(dims)) if at in dims))]
    if call.function == "stack":
        return [Call("take", (whole,), (at if count > 1 else "*", dim)) for at in range(count)]
    if call.function == "cat" and count > 1:
        return [Call("split", (whole,), (count, at, dim)) for at in range(count)]
    return []
