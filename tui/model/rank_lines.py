"""The tensors of one rank as lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from shardviz.check.verdicts import WORDS
from shardviz.text import bytes_text, natural_key, printable

from .rank_memory import part_text

if TYPE_CHECKING:
    from shardviz.check.verdicts import Verdict

    from .document import Document


Order = Literal["", "most bytes first", "wrong first", "by name"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""The ways to sort; the first is the model's own order."""


@dataclass(frozen=True)
class RankLine:
    """A tensor on a rank, or several that are alike.

    Attributes:
        entry: Its entry.
        name: Its name, or the first of several.
        title: The name, or the names folded, safe to print.
        verdict: The worst that was found of it.
        count: How many take memory on the rank.
        each: The bytes of each; None if they take no memory of their own.
        part: The rank's part of one of them.
    """

    entry: int
    name: str
    title: str
    verdict: Verdict
    count: int
    each: int | None
    part: str

    @property
    def size(self) -> str:
        """The bytes of one, and how many there are: `32 × 128 KiB`."""
        if self.each is None:
            return "-"
        return f"{self.count} × {bytes_text(self.each)}" if self.count > 1 else bytes_text(self.each)


def rank_lines(
    document: Document, rank: int, *, order: Order = "", text: str = "", each_layer: bool = False
) -> list[RankLine]:
    """Return the lines of a rank.

    Args:
        document: The dump.
        rank: The rank.
        order: How they are sorted.
        text: A part of the names that are listed.
        each_layer: Whether layers that are alike have a line each.
    """
    lines: list[RankLine] = []
    for index, entry in enumerate(document.entries):
        if rank in entry.tensor.shards:
            lines += _lines(document, index, rank, each_layer=each_layer)
    text = text.lower()
    lines = [line for line in lines if any(text in name.lower() for name in (line.title, *_names(document, line)))]
    match order:
        case "most bytes first":
            lines.sort(key=lambda line: -(line.each or 0) * line.count)
        case "wrong first":
            lines.sort(key=lambda line: list(WORDS).index(line.verdict))
        case "by name":
            lines.sort(key=lambda line: natural_key(line.title))
    return lines


def _names(document: Document, line: RankLine) -> list[str]:
    return [printable(name) for name in document.entries[line.entry].names] if line.count > 1 else []


def _lines(document: Document, index: int, rank: int, *, each_layer: bool) -> list[RankLine]:
    entry = document.entries[index]
    part, sizes, names = part_text(entry.tensor.shards[rank]), document.sizes_of(index, rank), entry.names
    if each_layer and len(names) > 1:
        each = sizes if len(sizes) == len(names) else [None] * len(names)
        return [
            RankLine(index, name, entry.title_of(name), entry.verdict_of(name), 1, size, part)
            for name, size in zip(names, each, strict=True)
        ]
    alike = len(set(sizes)) == 1
    size, count = (sizes[0], len(sizes)) if alike else (sum(sizes) if sizes else None, 1)
    return [RankLine(index, names[0], entry.title, entry.verdict, count, size, part)]
