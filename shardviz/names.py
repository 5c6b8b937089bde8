"""Names of tensors: identical layers folded into one line, natural order, strangers' names made safe to print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

Key = TypeVar("Key", bound="Hashable")

_NUMBER = re.compile(r"(?<![^.])(0|[1-9]\d{0,17})(?![^.])")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Fold:
    """Names that differ in one number only, as `layers.[0-31].wq.weight`.

    Attributes:
        prefix: What stands before the number; the whole name where there is no number.
        numbers: The numbers, as half-open ranges; empty for a single name without one.
        suffix: What stands after the number.
    """

    prefix: str
    numbers: tuple[tuple[int, int], ...] = ()
    suffix: str = ""

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.numbers) if self.numbers else 1

    def names(self) -> list[str]:
        """Return every name, in the numbers' order."""
        if not self.numbers:
            return [self.prefix]
        return [f"{self.prefix}{n}{self.suffix}" for start, stop in self.numbers for n in range(start, stop)]

    def __str__(self) -> str:
        if not self.numbers:
            return self.prefix
        if len(self) == 1:
            return f"{self.prefix}{self.numbers[0][0]}{self.suffix}"
        spans = ",".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in self.numbers)
        return f"{self.prefix}[{spans}]{self.suffix}"


def fold(named: Iterable[tuple[str, Key]]) -> list[tuple[Fold, Key]]:
    """Fold names that share everything but their first number, and a key.

    Returns:
        The folds, each with its key, in the order in which the first of their names came.
    """
    groups: dict[tuple[str, str, Key], list[int]] = {}
    for name, key in named:
        match = _NUMBER.search(name)
        if match is None:
            groups.setdefault((name, "", key), [])
        else:
            groups.setdefault((name[: match.start()], name[match.end() :], key), []).append(int(match[1]))
    return [(Fold(prefix, _spans(numbers), suffix), key) for (prefix, suffix, key), numbers in groups.items()]


def _spans(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return tuple(spans)


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key under which `layers.2` comes before `layers.10`."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d{1,18})", name) if part]


def printable(name: str) -> str:
    """Return the name with control and direction-changing characters spelled out: a terminal shows it as text."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", name)
