"""Names and numbers in sentences: folding, order, lists, counts, ranges, spelling, escapes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

Key = TypeVar("Key", bound="Hashable")

LEAST_STEPS = 5
"""Numbers at equal distances that are written as a range with a step; fewer are as brief as they are."""

MOST_PIECES = 8
"""Ranges and numbers of a list that are written out."""

INSIDE = "▸"
"""Between an axis's position and the positions of the next one inside of it."""

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")

_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")
_TURNS = re.compile("([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Fold:
    """Names that differ in one number only, as `layers.[0-31].wq.weight`.

    Attributes:
        prefix: The part before the number; the whole name if there is no number.
        numbers: The numbers, as half-open ranges; empty for a single name without one.
        suffix: The part after the number.
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
        return f"{self.prefix}[{','.join(map(_span, self.numbers))}]{self.suffix}"


def fold(named: Iterable[tuple[str, Key]], *, by_last: bool = False) -> list[tuple[Fold, Key]]:
    """Fold names that share everything but one number, the first or the last, and a key.

    Args:
        named: The names, each with its key.
        by_last: Whether their last number counts instead: that of an expert, if layers are folded already.

    Returns:
        The folds, each with its key, in the order in which the first of their names came.

    Example:
        >>> for folded, dtype in fold([("wte", "bf16"), ("h.0.w", "bf16"), ("h.1.w", "bf16"), ("h.2.w", "fp8")]):
        ...     print(folded, dtype)
        wte bf16
        h.[0-1].w bf16
        h.2.w fp8
    """
    groups: dict[tuple[str, str, bool, Key], list[int]] = {}
    for name, key in named:
        prefix, number, suffix = cut_at_last_number(name) if by_last else cut_at_number(name)
        numbers = groups.setdefault((prefix, suffix, number is None, key), [])
        if number is not None:
            numbers.append(number)
    return [(Fold(prefix, spans_of(numbers), suffix), key) for (prefix, suffix, _, key), numbers in groups.items()]


def folded_names(names: Iterable[str], most: int) -> str:
    """List the first `most` names, identical layers as one: `wte, layers.[0-3].w, ...`."""
    return listed((folded for folded, _ in fold((name, None) for name in names)), most)


def cut_at_number(name: str) -> tuple[str, int | None, str]:
    """Split a name at its first number: (before, number, after); None if it has no number."""
    match = _NUMBER.search(name)
    return (name, None, "") if match is None else (name[: match.start()], int(match[1]), name[match.end() :])


def cut_at_last_number(name: str) -> tuple[str, int | None, str]:
    """Split a name at its last number: (before, number, after); None if it has no number."""
    match = max(_NUMBER.finditer(name), key=lambda one: one.start(), default=None)
    return (name, None, "") if match is None else (name[: match.start()], int(match[1]), name[match.end() :])


def starred(name: str) -> str:
    """Return a name with `*` for its numbers.

    Example:
        >>> starred("layers.3.experts.12.w1")
        'layers.*.experts.*.w1'
    """
    return _NUMBER.sub("*", name)


def join_numbers(numbers: Iterable[int], comma: str = ", ") -> str:
    """Write rising numbers briefly: `0-3, 7`, or `0…1016 step 8`; long lists end in a count."""
    rising = sorted(numbers)
    pieces = _one_piece(rising) or _pieces(spans_of(rising))
    if len(pieces) <= MOST_PIECES:
        return comma.join(pieces)
    return f"{comma.join(pieces[: MOST_PIECES - 2])}{comma}… ({len(rising):,} in all)"


def range_text(rising: Sequence[int], dash: str = "…") -> str:
    """Write rising positions along an axis: `0…127`, or as `join_numbers` if there are gaps."""
    first, last = rising[0], rising[-1]
    if last - first + 1 > len(rising):
        return join_numbers(rising, ",")
    return f"{first}{dash}{last}" if last > first else str(first)


def _one_piece(rising: Sequence[int]) -> list[str]:
    """Write numbers with one equal step, as a group's ranks mostly have; empty for others."""
    if len(rising) < LEAST_STEPS:
        return []
    first, last, step = rising[0], rising[-1], rising[1] - rising[0]
    if not step or rising != [*range(first, last + 1, step)]:
        return []
    return [f"{first}-{last}" if step == 1 else f"{first}…{last} step {step}"]


def _pieces(spans: Sequence[tuple[int, int]]) -> list[str]:
    """Write spans, those of one length that follow each other in equal steps together."""
    pieces, at = [], 0
    while at < len(spans):
        count = _alike(spans, at)
        piece = _span(spans[at])
        if count >= LEAST_STEPS:
            step = spans[at + 1][0] - spans[at][0]
            piece += f"…{_span(spans[at + count - 1])} step {step}"
        else:
            count = 1
        pieces.append(piece)
        at += count
    return pieces


def _alike(spans: Sequence[tuple[int, int]], at: int) -> int:
    """Return how many spans from one on have its length and its distance to the next."""
    start, stop = spans[at]
    step = spans[at + 1][0] - start if at + 1 < len(spans) else 0
    end = at + 1
    while end < len(spans) and spans[end] == (start + (end - at) * step, stop + (end - at) * step):
        end += 1
    return end - at


def _span(span: tuple[int, int]) -> str:
    start, stop = span
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def spans_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the start and stop of each run of numbers that follow each other, in their order.

    Example:
        >>> spans_of([4, 5, 6, 0])
        ((4, 7), (0, 1))
    """
    rising = [*numbers]
    breaks = [at for at, (one, other) in enumerate(pairwise(rising), 1) if other != one + 1]
    return tuple((rising[start], rising[stop - 1] + 1) for start, stop in pairwise([0, *breaks, len(rising)]) if rising)


def natural_key(name: str) -> list[int | str]:
    """Return a sort key that puts `layers.2` before `layers.10`."""
    parts: list[int | str] = [*_TURNS.split(name)]
    parts[1::2] = map(int, parts[1::2])
    return parts


def printable(name: str) -> str:
    """Spell out the control, invisible and direction-changing characters of a name.

    Those are the characters that `str.isprintable` rejects.
    """
    if name.isprintable():
        return name
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in name)


def listed(things: Iterable[object], most: int = 3) -> str:
    """Return things between commas: the first three, or the first `most`, with dots if there are more."""
    shown = [str(thing) for thing in islice(things, most + 1)]
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")


def named_ranks(ranks: Collection[int], most: int | None = None) -> str:
    """Return ranks in words: `rank 3`, `ranks 0-3, 8`; with `most`, the first few and dots."""
    numbers = join_numbers(ranks) if most is None else listed(sorted(ranks), most)
    return f"rank{'s' * (len(ranks) > 1)} {numbers}"


def cut_at_comma(text: str, most: int) -> str:
    """Cut a list longer than `most` characters at a comma, with dots for the rest."""
    if len(text) <= most:
        return text
    kept = text[:most].rpartition(",")[0]
    return f"{kept}, ..." if text[len(kept) + 1 :].startswith(" ") else f"{kept},..."


def counted(number: int, of: str) -> str:
    """Return a number of things in words: `1 tensor`, `4 tensors`."""
    return f"{number:,} {of}" if number == 1 else f"{number:,} {of}s"


def as_clause(sentence: str) -> str:
    """Return a sentence as it goes on after a colon; one that begins with `FSDP` as it is.

    Example:
        >>> as_clause("Ranks differ"), as_clause("FSDP averages")
        ('ranks differ', 'FSDP averages')
    """
    return sentence if sentence[1:2].isupper() else f"{sentence[:1].lower()}{sentence[1:]}"


def bytes_text(count: int) -> str:
    """Write a number of bytes with three digits: `512 B`, `1.5 KiB`, `34.2 MiB`."""
    if count < 1024:
        return f"{count} B"
    size, unit = count / 1024, 0
    while round(size) >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if size >= 999.5 else f"{size:.3g} {UNITS[unit]}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most like a misspelt one; None if none is like it.

    Args:
        word: What was written.
        known: What could have been meant.
        cutoff: How alike they must be, from 0 to 1.
    """
    from difflib import get_close_matches  # not for `shardviz --help`

    return next(iter(get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint such as `did you mean mesh?`; empty if no known word is similar."""
    close = nearest(word, known)
    return f"did you mean {printable(close)}?" if close is not None else ""
