"""An expression of a map for one name: its stars filled with the name's words, its names with tensors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

from shardviz.checkpoint.maps.language import Call, Expression, Name, names_in
from shardviz.checkpoint.maps.made import Op
from shardviz.checkpoint.maps.named import Named, filled, pattern_of
from shardviz.checkpoint.maps.views import MisfitError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    return [(operand, (*groups, str(number))) for number in _numbers(operand, groups, right)]


def _takers(expression: Expression) -> int:
    """Return how many functions within an expression stand for one operand for each number."""
    if isinstance(expression, Name):
        return 0
    own = expression.function in ("cat", "stack") and len(expression.operands) == 1
    return own + max(_takers(operand) for operand in expression.operands)


def _numbers(operand: Expression, groups: Sequence[str], right: Named) -> range:
    """Return the numbers that the first free star stands for: from 0, in order.

    Raises:
        LackingError: There are none, or one is left out.
    """
    found: set[int] = set()
    for pattern in names_in(operand):
        begin = filled(pattern, groups)
        found |= right.numbers_after(begin) if "*" in begin else set()
    if not found or max(found) + 1 != len(found) or len(found) > MAX_PARTS:
        lost = next((number for number in range(MAX_PARTS) if number not in found), 0)
        first = next(one for one in names_in(operand) if one.count("*") > len(groups))
        raise LackingError(filled(first, (*groups, str(lost))))
    return range(len(found))


def _value(number: int | str, groups: Sequence[str], numbers: Numbers) -> int:
    if isinstance(number, int):
        return number
    if number in numbers:
        return numbers[number]
    if number == "*" and groups and re.fullmatch("[0-9]{1,15}", groups[0]):
        return int(groups[0])
    raise MisfitError(f"{number} stands for no number here")
