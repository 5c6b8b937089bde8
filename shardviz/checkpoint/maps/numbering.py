"""Layer and expert numbers in tensor names: left out, compared, or renumbered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

_NUMBER = re.compile(r"(?<![^.\s(])[0-9]+(?=\.)|(?<=\.)[0-9]+(?![^.\s,)])")
SEVERAL = 3
"""Tensors that move together are a layer, even where no other layer moves."""


def starred(text: str) -> str:
    """Return text with `*` for the numbers in the names of tensors.

    Example:
        >>> starred("cat(layers.0.w3, layers.0.w1, 0)")
        'cat(layers.*.w3, layers.*.w1, 0)'
    """
    return _NUMBER.sub("*", text)


def renumbering(names: list[str], instead: dict[str, str]) -> tuple[int, list[int]] | None:
    """Return which number in the names is permuted, and its order; None if none is."""
    pairs_of_names = [(name, instead.get(name, name)) for name in names]
    for at in range(len(_NUMBER.findall(names[0]))):
        pairs: dict[str, str] = {}
        for name, second_name in pairs_of_names:
            first_numbers, second_numbers = _NUMBER.findall(name), _NUMBER.findall(second_name)
            if (
                _with_star(name, at) != _with_star(second_name, at)
                or len(first_numbers) <= at
                or pairs.setdefault(first_numbers[at], second_numbers[at]) != second_numbers[at]
            ):
                break
        else:
            numbers = [int(pairs.get(str(number), -1)) for number in range(len(pairs))]
            if len(numbers) > 1 and sorted(numbers) == list(range(len(numbers))):
                return at, numbers
    return None


def _with_star(name: str, at: int) -> str:
    """Return a name with `*` for one of its numbers."""
    matches = list(_NUMBER.finditer(name))
    return name[: matches[at].start()] + "*" + name[matches[at].end() :] if at < len(matches) else name


def counted_word(name: str, at: int) -> str:
    """Return what a number of a name counts: the words before it."""
    return printable(name[: list(_NUMBER.finditer(name))[at].start()].rstrip(".").rpartition(".")[2])


def star_shared_numbers(name: str, second_name: str) -> str:
    """Return a name with `*` for the numbers that it shares with another one."""
    second_numbers = _NUMBER.findall(second_name)
    numbers = iter(range(len(second_numbers) + len(name)))

    def turned(match: re.Match[str]) -> str:
        at = next(numbers)
        return "*" if at < len(second_numbers) and second_numbers[at] == match[0] else match[0]

    return printable(_NUMBER.sub(turned, name))


def _are_kept(before: str, numbers: Container[int], kept_names: Iterable[str]) -> bool:
    """Whether any tensor of these numbers is where it was."""
    rests = (name[len(before) :].partition(".")[0] for name in kept_names if name.startswith(before))
    return any(rest.isdecimal() and int(rest) in numbers for rest in rests)


@dataclass(frozen=True, slots=True)
class Renumbering:
    """Layers or experts that have different numbers on the second side.

    Attributes:
        what: What is numbered.
        names: Its tensors.
        numbers: The other number of each.
        is_again: Whether any other number is that of one that is also where it was, or of several.
    """

    what: str
    names: frozenset[str]
    numbers: Mapping[int, int]
    is_again: bool


def find_renumberings(instead: Mapping[str, str], kept_names: Iterable[str]) -> Iterator[Renumbering]:
    """Yield renumbered layers or experts: all tensors of a number, at least two, have moved.

    Of a single number it takes three.

    Args:
        instead: The names of tensors that have a different name now, and that name.
        kept_names: The names of those that stayed.
    """
    by_prefix: dict[str, dict[int, dict[str, int]]] = {}
    for name, second_name in instead.items():
        first_numbers, second_numbers = _NUMBER.findall(name), _NUMBER.findall(second_name)
        odd = [at for at, pair in enumerate(zip(first_numbers, second_numbers, strict=False)) if pair[0] != pair[1]]
        if (
            len(first_numbers) == len(second_numbers)
            and len(odd) == 1
            and _with_star(name, odd[0]) == _with_star(second_name, odd[0])
        ):
            before = name[: list(_NUMBER.finditer(name))[odd[0]].start()]
            by_prefix.setdefault(before, {}).setdefault(int(first_numbers[odd[0]]), {})[name] = int(
                second_numbers[odd[0]]
            )
    for before, numbers in by_prefix.items():
        is_whole = all(len(own) > 1 and len(set(own.values())) == 1 for own in numbers.values())
        is_sure = len(numbers) > 1 or min(map(len, numbers.values())) >= SEVERAL
        if is_whole and is_sure and not _are_kept(before, numbers, kept_names):
            others = {number: next(iter(own.values())) for number, own in sorted(numbers.items())}
            is_again = len(set(others.values())) < len(others) or _are_kept(before, [*others.values()], kept_names)
            names = frozenset(name for own in numbers.values() for name in own)
            yield Renumbering(printable(before.rstrip(".").rpartition(".")[2]), names, others, is_again)
