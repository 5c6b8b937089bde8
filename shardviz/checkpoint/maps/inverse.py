"""Rules the other way round: what the tensors on the right are made of, where a model has those and not the left."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.maps.functions import INVERSE
from shardviz.checkpoint.maps.language import NOTHING, Call, Name, Rule, names_in
from shardviz.checkpoint.maps.matching import is_turned

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from shardviz.checkpoint.maps.language import Expression


def towards(rules: Iterable[Rule], names: Collection[str], others: Collection[str]) -> list[Rule]:
    """Return rules that have some names on their left; those that have them on their right are turned round.

    Args:
        rules: The map.
        names: What is to be made, such as a model's names.
        others: What it is made of, such as a checkpoint's.
    """
    return [one for rule in rules for one in (inverted(rule) if is_turned(rule, names, others) else [rule])]


def inverted(rule: Rule) -> list[Rule]:
    """Return what a rule's operands are made of; nothing if that cannot be said without their shapes.

    Example:
        >>> from shardviz.checkpoint.maps.language import parse_rules
        >>> [str(one.right) for one in inverted(parse_rules("gate_up = cat(w1, w3)", "my.map")[0])]
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
    """Yield each name in an expression with what it is of the whole, as far as shapes do not matter."""
    if isinstance(expression, Name):
        yield expression.pattern, whole
        return
    for operand, part in zip(expression.operands, _own_parts(expression, whole), strict=False):
        yield from _parts(operand, part)


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
