"""How a target's tensors are made of a source's: `qkv = cat(q, k, v)`, by pattern over the target's names.

The lines are those of a map for `shardviz diff`: the target's name first, `*` for anything, then a name of the source,
or `cat`, `stack`, `split`, `slice`, `transpose` of some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.errors import ShardvizError
from shardviz.reference.lookup import read_region
from shardviz.reference.names import matched, read_map
from shardviz.text import listed, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.region import Region
    from shardviz.reference.files import Entry

AnyMap = Mapping[str, str] | Iterable[Any] | Path | str
"""Expressions by pattern over the target's names; a file of such lines; or rules with `left` and `right`, parsed."""
NOTHING = "none"
USAGE = "write `qkv = cat(q, k, v, 0)`, `w = transpose(w)`, `k = split(kv, 2, 0)`, `k = slice(qkv, 8, 12)`, or a name"
_TOKEN = re.compile(r"\s*([(),]|[^\s(),]+)")


@dataclass(frozen=True)
class Expression:
    """A tensor of the source by its name, or a function of some.

    Attributes:
        word: The name, or the function's.
        operands: What it is a function of; empty for a name.
        numbers: Its numbers.
    """

    word: str
    operands: tuple[Expression, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the source, from left to right."""
        return tuple(name for one in self.operands for name in one.names) if self.operands else (self.word,)


@dataclass(frozen=True)
class Made:
    """A tensor that is made of others, as a whole each time that it is read.

    Attributes:
        expression: How.
        entries: The source's tensors.
        shape: Its shape.
        dtype: Its element type: that of the first of them.
    """

    expression: Expression
    entries: Mapping[str, Entry]
    shape: tuple[int, ...]
    dtype: str

    @property
    def bits(self) -> NDArray[Any]:
        """All values."""
        return np.ascontiguousarray(_made(self.expression, self.entries))

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part."""
        return read_region(self.bits, region)


def rules_of(given: AnyMap | None) -> dict[str, str]:
    """Return a map as expressions by pattern.

    Raises:
        ShardvizError: It is a file that cannot be read.
    """
    if given is None:
        return {}
    if isinstance(given, str | Path):
        return read_map(given)
    if isinstance(given, Mapping):
        return dict(given)
    rules: Iterable[Any] = given
    return {rule.left: str(rule.right or NOTHING) for rule in rules}


def expressions(names: Collection[str], sources: Collection[str], rules: Mapping[str, str]) -> dict[str, Expression]:
    """Return what each of the target's tensors is made of; one without a rule is the source's of its own name, if any.

    Args:
        names: The target's names.
        sources: The source's.
        rules: Expressions by pattern; the first that fits a name counts; one for `none` is made of nothing.

    Raises:
        ShardvizError: A rule fits no name, cannot be read, or names a tensor that the source does not have.

    Example:
        >>> made = expressions(["0.qkv"], ["h.0.q", "h.0.kv"], {"*.qkv": "cat(h.*.q, h.*.kv)"})
        >>> made["0.qkv"].names
        ('h.0.q', 'h.0.kv')
    """
    patterns = {pattern: re.compile("(.*?)".join(map(re.escape, pattern.split("*")))) for pattern in rules}
    _refuse_idle(patterns, names)
    found: dict[str, Expression] = {}
    left = []
    for name in names:
        fits = ((pattern, rule.fullmatch(name)) for pattern, rule in patterns.items())
        pattern, match = next(((one, hit) for one, hit in fits if hit is not None), ("", None))
        if match is None:
            left.append(name)
        elif rules[pattern].strip() != NOTHING:
            found[name] = parsed(_substituted(rules[pattern], match.groups(), pattern))
            _refuse_absent(name, found[name], sources)
    same = matched(left, set(sources)).names
    return found | {name: Expression(same[name]) for name in left if name in same}


def _refuse_idle(patterns: Mapping[str, re.Pattern[str]], names: Collection[str]) -> None:
    for pattern, rule in patterns.items():
        if not any(map(rule.fullmatch, names)):
            close = nearest(pattern, names)
            hint = f"did you mean {close}?" if close else f"the target has {listed(sorted(names), 3)}"
            raise ShardvizError(f"map: no tensor of the target fits {pattern!r}", hint)


def _refuse_absent(name: str, made: Expression, sources: Collection[str]) -> None:
    for source in made.names:
        if source not in sources:
            close = nearest(source, sources)
            hint = f"did you mean {close}?" if close else f"the source has {listed(sorted(sources), 3)}"
            raise ShardvizError(f"map: {name} is made of {source}, which the source does not have", hint)


def _substituted(text: str, groups: tuple[str, ...], pattern: str) -> str:
    """Put what stood in the place of each `*` into every name of an expression, from left to right in each."""
    words = []
    for word in re.split(r"([(),\s])", text):
        pieces = word.split("*")
        if len(pieces) - 1 > len(groups):
            raise ShardvizError(f"map: {word!r} has more * than {pattern!r}", "each * stands for one of its pattern")
        words.append("".join(a + b for a, b in zip(pieces, (*groups[: len(pieces) - 1], ""), strict=True)))
    return "".join(words)


def parsed(text: str) -> Expression:
    """Read an expression.

    Raises:
        ShardvizError: It cannot be read.
    """
    tokens = [found[1] for found in _TOKEN.finditer(text)]
    expression, rest = _expression(tokens, text)
    if rest:
        raise ShardvizError(f"map: {text!r} goes on after its end, at {rest[0]!r}", USAGE)
    return expression


def _expression(tokens: list[str], text: str) -> tuple[Expression, list[str]]:
    if not tokens or tokens[0] in "(),":
        raise ShardvizError(f"map: {text!r} lacks a name", USAGE)
    word, rest = tokens[0], tokens[1:]
    if not rest or rest[0] != "(":
        return Expression(word), rest
    if word not in FUNCTIONS:
        raise ShardvizError(f"map: unknown function {word!r}", f"functions: {', '.join(FUNCTIONS)}")
    parts: list[Expression] = []
    while rest and rest[0] in "(,":
        part, rest = _expression(rest[1:], text)
        parts.append(part)
    if not rest or rest[0] != ")":
        raise ShardvizError(f"map: {text!r} lacks a )", USAGE)
    numbers = tuple(int(one.word) for one in parts if re.fullmatch("-?[0-9]+", one.word))
    operands = tuple(one for one in parts if not re.fullmatch("-?[0-9]+", one.word))
    if not operands:
        raise ShardvizError(f"map: {word} in {text!r} takes at least one tensor", USAGE)
    return Expression(word, operands, numbers), rest[1:]


def entry_for(name: str, made: Expression, entries: Mapping[str, Entry]) -> Entry:
    """Return the tensor that an expression makes.

    Raises:
        ShardvizError: Its operands do not fit each other.
    """
    if not made.operands:
        return entries[made.word]
    try:
        shapes = {one: np.broadcast_to(np.uint8(0), tuple(entries[one].shape)) for one in made.names}
        shape = tuple(_evaluated(made, shapes).shape)
    except (ValueError, IndexError) as error:
        sizes = ", ".join(str(list(entries[one].shape)) for one in made.names)
        raise ShardvizError(f"map: {name} cannot be made of {sizes}: {error}", USAGE) from error
    return Made(made, {one: entries[one] for one in made.names}, shape, entries[made.names[0]].dtype)


def _made(expression: Expression, entries: Mapping[str, Entry]) -> NDArray[Any]:
    return _evaluated(expression, {name: entry.bits for name, entry in entries.items()})


def _evaluated(expression: Expression, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    if not expression.operands:
        return arrays[expression.word]
    parts = [_evaluated(one, arrays) for one in expression.operands]
    return FUNCTIONS[expression.word](parts, expression.numbers)


def _split(parts: Sequence[NDArray[Any]], numbers: Sequence[int]) -> NDArray[Any]:
    found: NDArray[Any] = np.split(parts[0], numbers[0], _at(numbers, 2))[numbers[1]]
    return found


def _slice(parts: Sequence[NDArray[Any]], numbers: Sequence[int]) -> NDArray[Any]:
    found: NDArray[Any] = np.moveaxis(parts[0], _at(numbers, 2), 0)[numbers[0] : numbers[1]]
    turned: NDArray[Any] = np.moveaxis(found, 0, _at(numbers, 2))
    return turned


def _transpose(parts: Sequence[NDArray[Any]], numbers: Sequence[int]) -> NDArray[Any]:
    found: NDArray[Any] = parts[0].swapaxes(_at(numbers, 0, -2), _at(numbers, 1, -1))
    return found


def _at(numbers: Sequence[int], place: int, default: int = 0) -> int:
    return numbers[place] if len(numbers) > place else default


FUNCTIONS: dict[str, Callable[[Sequence[NDArray[Any]], Sequence[int]], NDArray[Any]]] = {
    "cat": lambda parts, numbers: np.concatenate(parts, _at(numbers, 0)),
    "stack": lambda parts, numbers: np.stack(parts, _at(numbers, 0)),
    "split": _split,
    "slice": _slice,
    "transpose": _transpose,
}
"""As in the maps of `shardviz diff`: tensors first, then numbers; dims as torch counts them, 0 by default."""
