"""Where an element is and who has it: the ranks that should hold it and do, and where in their own part it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.picture.model.holders import ranks_of, ranks_text
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD

from .memory import claimed_in_memory, ids_in_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.holders import Mask
    from shardviz.picture.model.sides import Sides

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
