"""The tensors of one rank as lines, and which ranks have an element and where in their shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from shardviz.check.verdicts import WORDS
from shardviz.errors import ShardvizError
from shardviz.picture.model.holders import ranks_of, ranks_text
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD
from shardviz.text import bytes_text, natural_key, printable

from .rank_memory import claimed_in_memory, ids_in_memory, part_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.verdicts import Verdict
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.holders import Mask
    from shardviz.picture.model.sides import Sides

    from .document import Document


Order = Literal["", "most bytes first", "wrong first", "by name"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""The ways to sort; the first is the model's own order."""

_VERDICTS = list(WORDS)


@dataclass(frozen=True)
class RankLine:
    """A tensor on a rank, or several that are alike.

    Attributes:
        entry: Its entry.
        name: Its name, or the first of several.
        title: The name, or the names folded, safe to print.
        verdict: The worst that was found of it.
        count: How many take memory on the rank.
        each: The bytes of each; None where they take no memory of their own.
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
    wanted = text.lower()
    return _sorted([line for line in lines if _has(document, line, wanted)], order)


def _has(document: Document, line: RankLine, text: str) -> bool:
    if text in line.title.lower():
        return True
    names = document.entries[line.entry].names
    return line.count > 1 and any(text in printable(name).lower() for name in names)


def _lines(document: Document, index: int, rank: int, *, each_layer: bool) -> list[RankLine]:
    entry = document.entries[index]
    part, sizes, names = part_text(entry.tensor.shards[rank]), document.sizes_of(index, rank), entry.names
    if each_layer and len(names) > 1:
        each: Sequence[int | None] = sizes if len(sizes) == len(names) else [None] * len(names)
        return [
            RankLine(index, name, entry.title_of(name), entry.verdict_of(name), 1, size, part)
            for name, size in zip(names, each, strict=True)
        ]
    alike = len(set(sizes)) == 1
    size, count = (sizes[0], len(sizes)) if alike else (sum(sizes) if sizes else None, 1)
    return [RankLine(index, names[0], entry.title, entry.verdict, count, size, part)]


def _sorted(lines: list[RankLine], order: Order) -> list[RankLine]:
    match order:
        case "most bytes first":
            return sorted(lines, key=lambda line: -(line.each or 0) * line.count)
        case "wrong first":
            return sorted(lines, key=lambda line: _VERDICTS.index(line.verdict))
        case "by name":
            return sorted(lines, key=lambda line: natural_key(line.title))
        case _:
            return lines


MOST_LOOKED_AT = 32
"""Ranks whose own parts are looked into while a key is typed."""


def who_has(dump: Dump, tensor: Tensor, sides: Sides, place: Sequence[int], name: str = "") -> list[str]:
    """Say who should hold an element and who does, in a line each, with its index in their own part.

    Args:
        dump: The dump.
        tensor: The tensor.
        sides: Who holds what of it.
        place: The element's index in the tensor's shape.
        name: Which of the tensor's names.
    """
    missing = len(sides.holders.shape) - len(place)
    cell = sides.at((*(0,) * missing, *place))
    mesh = tensor.claimed.mesh if tensor.claimed else dump.files.mesh
    lines = []
    if sides.has_claimed:
        lines.append(_line(sides.titles[0], cell.claimed, mesh, dump, tensor, place, name))
    if sides.has_held:
        lines.append(_line(sides.titles[1], cell.held, mesh, dump, tensor, place, name))
    if sides.titles == CLAIMED_AND_HELD and cell.different:
        lines.append(f"{WRONG} it is not where the placements claim")
    elif cell.different:
        lines.append(f"{WRONG} it is not where it is intended")
    elif cell.guilty:
        lines += [f"{WRONG} {words}" for _, words in sides.reasons_at(cell)]
    return lines


def _line(title: str, mask: Mask, mesh: Mesh, dump: Dump, tensor: Tensor, place: Sequence[int], name: str) -> str:
    ranks = ranks_of(mask)
    if not ranks:
        return f"{title:<8} by nobody"
    who = ranks_text(mask)
    if len(ranks) == 1 and ranks[0] in mesh:
        who += f" ({mesh.label(ranks[0]).replace(',', '')})"
    places = {_local(title, dump, tensor, rank, place, name) for rank in ranks[:MOST_LOOKED_AT]}
    known = places - {None}
    is_one = len(known) == len(places) == 1 and len(ranks) <= MOST_LOOKED_AT
    there = f", there at {list(known.pop() or ())}" if is_one else ""
    return f"{title:<8} by rank{'s' if len(ranks) > 1 else ''} {who}{there}"


def _local(
    title: str, dump: Dump, tensor: Tensor, rank: int, place: Sequence[int], name: str
) -> tuple[int, ...] | None:
    """Return the index of an element in a rank's own part; None where that is not known."""
    if rank not in tensor.shards or title not in CLAIMED_AND_HELD:
        return None
    try:
        shard = tensor.shards[rank]
        ids = claimed_in_memory(shard) if title == "claimed" else ids_in_memory(dump, tensor, rank, name)
    except ShardvizError:
        return None
    return ids.find(place) if ids is not None and len(ids.whole) == len(place) else None
