"""The map language: `name = expression` lines, parsed into rules; `LANGUAGE` documents it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from shardviz.checkpoint.maps.functions import FUNCTIONS
from shardviz.errors import ShardvizError
from shardviz.text import did_you_mean, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LANGUAGE = """\
a map has lines `name = expression`: how a tensor of one checkpoint is made of the other's tensors
  layers.*.wq.* = model.layers.*.self_attn.q_proj.*    each * stands for the same text on both sides
  layers.*.gate_up = cat(layers.*.w1, layers.*.w3, 0)  dims are as torch counts them; the default is 0
  experts.w1 = stack(experts.*.w1)                     a * that the left side lacks stands for every number, in order
  w1.* = take(w1, *)                                   a * as a number
  q = rotary(wq, head_dim)                             head_dim, heads, kv_heads: from a config.json next to either
  name ?= expression                                   only if the names exist; the first such line that fits is used
  name = none, none = name                             only one checkpoint has it, as intended
functions:
"""
"""What `shardviz diff --help` says of maps; the functions follow."""

MAP_LINES = "lines of a map: layers.*.wq.* = model.layers.*.self_attn.q_proj.*; `shardviz diff --help` lists functions"
MAX_MAP = 1 << 20
"""Bytes of a map."""

MAX_NESTED = 16
"""Functions within functions."""

NOTHING = "none"
VARIABLES = ("head_dim", "heads", "kv_heads")
_TOKEN = re.compile(r"\s*([(),]|[^\s(),]+)")


@dataclass(frozen=True, slots=True)
class Name:
    """A tensor's name, or a pattern with `*` for several."""

    pattern: str

    def __str__(self) -> str:
        return self.pattern


@dataclass(frozen=True, slots=True)
class Call:
    """A function call in a map's expression.

    Attributes:
        operands: The tensors, or what makes them.
        numbers: Its numbers: as written, a variable, or `*`.
    """

    function: str
    operands: tuple[Expression, ...]
    numbers: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, (*self.operands, *self.numbers)))})"


Expression: TypeAlias = Name | Call


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a map.

    Attributes:
        left: The name of a tensor, or a pattern; `none` for what only the right side has.
        right: What it is made of; None if the other side has nothing in its place.
        where: The file and line, for messages.
        optional: Whether it may fit nothing.
    """

    left: str
    right: Expression | None
    where: str
    optional: bool


def names_in(expression: Expression | None) -> Iterator[str]:
    """Yield the names, or patterns, of the tensors in an expression, from left to right."""
    if isinstance(expression, Name):
        yield expression.pattern
    elif expression is not None:
        for operand in expression.operands:
            yield from names_in(operand)


def read_rules(path: Path | str) -> tuple[Rule, ...]:
    """Read a map from a file.

    Raises:
        ShardvizError: The file cannot be read, or one of its lines: the message has its number.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_MAP + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ShardvizError(f"cannot read {path}: {why}", MAP_LINES) from error
    if len(text) > MAX_MAP:
        raise ShardvizError(f"{path} has more than {MAX_MAP:,} bytes", MAP_LINES)
    return parse_rules(text, str(path))


def parse_rules(text: str, source: str) -> tuple[Rule, ...]:
    """Read a map from its text.

    Args:
        source: What it is called in messages.

    Raises:
        ShardvizError: A line cannot be read, or is a second rule for a name.

    Example:
        >>> parse_rules("gate_up = cat(w1, w3, 0)  # halves", "my.map")[0].right.operands
        (Name(pattern='w1'), Name(pattern='w3'))
    """
    rules: dict[tuple[str, str], Rule] = {}
    for number, line in enumerate(text.splitlines(), 1):
        written = line.partition("#")[0].strip()
        if written:
            rule = _rule(written, f"{source}, line {number}")
            key = rule.left, str(rule.right) if rule.optional or rule.left == NOTHING else ""
            if key in rules:
                name = printable(rule.left)
                raise ShardvizError(f"{rule.where}: {name} comes twice", f"keep one of the lines: {rules[key].where}")
            rules[key] = rule
    return tuple(rules.values())


def rules_of(names: Mapping[str, str], source: str) -> tuple[Rule, ...]:
    """Return the rules of a Python mapping; a name that ends in `?` need not match anything.

    Raises:
        ShardvizError: One of them cannot be read.
    """
    return tuple(
        _parse_rule(left.rstrip("?").strip(), right, source, optional=left.endswith("?"))
        for left, right in names.items()
    )


def mapping_of(rules: tuple[Rule, ...]) -> dict[str, str]:
    """Return rules as text, for the processes of a job: what `rules_of` reads."""
    mapping: dict[str, str] = {}
    for rule in rules:
        key = f"{rule.left}?" if rule.optional else rule.left
        while key in mapping:  # lines for one name, of which the first that fits counts
            key += "?"
        mapping[key] = str(rule.right or NOTHING)
    return mapping


def _rule(written: str, where: str) -> Rule:
    left, _, right = (part.strip() for part in written.partition("="))
    optional = left.endswith("?")
    left = left.removesuffix("?").strip()
    if not left or not right or "=" in right or re.search(r"[\s(),]", left):
        shown = repr(printable(written)[:80])
        raise ShardvizError(f"{where}: {shown} is not `name = expression`", MAP_LINES)
    return _parse_rule(left, right, where, optional=optional)


def _parse_rule(left: str, right: str, where: str, *, optional: bool) -> Rule:
    tokens = [found[1] for found in _TOKEN.finditer(right)]
    expression, unread = _expression(tokens, where, right, 0)
    if unread:
        shown = repr(printable(right)[:80])
        raise ShardvizError(f"{where}: {shown} goes on after its end, at {printable(unread[0])[:40]!r}", MAP_LINES)
    if isinstance(expression, Name) and expression.pattern == NOTHING:
        return Rule(left, None, where, optional)
    if isinstance(expression, Name) and expression.pattern.count("*") > left.count("*") and left != NOTHING:
        hint = "each * of a name stands for one of its pattern"
        raise ShardvizError(f"{where}: {printable(str(expression))!r} has more * than {printable(left)!r}", hint)
    return Rule(left, expression, where, optional)


def _expression(tokens: list[str], where: str, text: str, depth: int) -> tuple[Expression, list[str]]:
    """Read an expression; return it and what follows."""
    shown = repr(printable(text)[:80])
    if depth > MAX_NESTED:
        raise ShardvizError(f"{where}: more than {MAX_NESTED} functions within each other", "use two lines")
    if not tokens or tokens[0] in "(),":
        raise ShardvizError(f"{where}: {shown} lacks a name" + (f" before {tokens[0]!r}" if tokens else ""), MAP_LINES)
    word, unread = tokens[0], tokens[1:]
    if not unread or unread[0] != "(":
        return Name(word), unread
    if word not in FUNCTIONS:
        hint = did_you_mean(word, FUNCTIONS) or f"functions: {', '.join(FUNCTIONS)}"
        raise ShardvizError(f"{where}: unknown function {printable(word)[:40]!r}", hint)
    parts: list[Expression] = []
    unread = unread[1:]
    while True:
        operand, unread = _expression(unread, where, text, depth + 1)
        parts.append(operand)
        if not unread:
            raise ShardvizError(f"{where}: {shown} lacks a ) at its end", MAP_LINES)
        separator, unread = unread[0], unread[1:]
        if separator == ")":
            return _call(word, parts, where), unread
        if separator != ",":
            raise ShardvizError(f"{where}: {shown} lacks a comma before {printable(separator)[:40]!r}", MAP_LINES)


def _call(function: str, parts: list[Expression], where: str) -> Call:
    """Tell tensors from numbers: these come last."""
    numbers: list[int | str] = []
    kind = FUNCTIONS[function]
    few, many = kind.operands
    while parts and isinstance(parts[-1], Name) and (number := _number(parts[-1].pattern)) is not None:
        if number == "*" and len(parts) <= few:
            break  # a tensor of any name
        numbers.insert(0, number)
        parts = parts[:-1]
    written = f"{where}: {function}({', '.join(map(str, (*parts, *numbers)))})"
    if any(isinstance(part, Name) and _number(part.pattern) not in (None, "*") for part in parts) or not parts:
        raise ShardvizError(f"{written}: tensors come first, then numbers", f"as in {kind.usage}")
    if not few <= len(parts) <= many or not kind.numbers[0] <= len(numbers) <= kind.numbers[1]:
        raise ShardvizError(f"{printable(written)}: {function} takes {kind.takes}", f"as in {kind.usage}")
    return Call(function, tuple(parts), tuple(numbers))


def _number(word: str) -> int | str | None:
    """Return a number, a variable or `*` that stands for one; None for a tensor's name."""
    if re.fullmatch(r"-?[0-9]{1,15}", word):
        return int(word)
    return word if word == "*" or word in VARIABLES else None


def functions_text() -> str:
    """Return a line for each function, for `--help`."""
    width = max(len(kind.usage) for kind in FUNCTIONS.values())
    return "".join(f"  {kind.usage:<{width}}  {kind.text}\n" for kind in FUNCTIONS.values())
