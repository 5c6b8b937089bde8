"""Sets of ranks in few characters: by number, `0-3,8`, or by the coordinates that they share, `tp=0`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import Mask, ranks_of, ranks_text

if TYPE_CHECKING:
    from shardviz.layout.mesh import Mesh

SHORT = 12
"""Rank numbers up to this many characters are written out wherever they fit."""


def ranks_label(mask: Mask, mesh: Mesh | None, room: int) -> str:
    """Name a set of ranks in `room` characters, at least enough for a count.

    Args:
        mask: The ranks.
        mesh: Where they are; gives the coordinates that they share.
        room: Characters to use at most; the count of ranks is used where nothing else fits.
    """
    if not mask:
        return "nobody"
    numbers = ranks_text(mask)
    if len(numbers) <= min(room, SHORT):
        return numbers
    coords = shared_coords(mask, mesh) if mesh is not None else ""
    if coords and len(coords) <= room:
        return coords
    if len(numbers) <= room:
        return numbers
    count = len(ranks_of(mask))
    worded = f"{count:,} ranks"
    return worded if len(worded) <= room else f"{count}r"


def shared_coords(mask: Mask, mesh: Mesh) -> str:
    """Return the coordinates that make up exactly this set, `tp=0`; empty where none do.

    Axes along which the set holds every coordinate are left out, so the whole mesh is `all ranks`.
    """
    ranks = ranks_of(mask)
    if any(rank not in mesh for rank in ranks):
        return ""
    coords = [mesh.coord_of(rank) for rank in ranks]
    along = [sorted({coord[axis] for coord in coords}) for axis in range(mesh.ndim)]
    if math.prod(map(len, along)) != len(ranks):
        return ""
    parts = [
        f"{axis}={_spans(positions)}"
        for axis, size, positions in zip(mesh.axes, mesh.shape, along, strict=True)
        if len(positions) < size
    ]
    return " ".join(parts) or "all ranks"


def _spans(positions: list[int]) -> str:
    return ranks_text(sum(1 << position for position in positions))
