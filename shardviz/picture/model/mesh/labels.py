"""Sets of ranks in few characters: by number, `0-3,8`, or by their coordinates, `tp=0` or `tp=0 ▸ fsdp 0…127`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import Mask, ranks_of, ranks_text
from shardviz.text import INSIDE, range_text

if TYPE_CHECKING:
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.picture.model.palette import Colouring

FEW = 16
"""Of so many ranks the first and the last say more than how many they are."""

HANDFUL = 3
"""So many ranks are named by their numbers, also where they hold different parts."""

SHORT = 12
"""Rank numbers up to this many characters are written out wherever they fit."""


def ranks_label(mask: Mask, colouring: Colouring, room: int, *, many: bool = False) -> str:
    """Name a set of ranks in `room` characters, at least enough for a count.

    Args:
        mask: The ranks.
        colouring: Where they are; gives their coordinates.
        room: Characters to use at most; the count of ranks is used where nothing else fits.
        many: Whether they hold different parts, and not copies of one.
    """
    labels = rank_labels(mask, colouring, many=many)
    return next((label for label in labels if len(label) <= room), labels[-1])


@lru_cache(maxsize=1 << 14)
def rank_labels(mask: Mask, colouring: Colouring, *, many: bool = False) -> tuple[str, ...]:
    """Return the names of a set of ranks, the one that says most first, a bare count last.

    Of ranks that hold different parts, names that do not show it begin with `~`.
    """
    if not mask:
        return ("nobody",)
    numbers, count = ranks_text(mask), mask.bit_count()
    coords = _coords(mask, colouring, many=many) if count > 1 else ()
    is_brief = len(numbers) <= SHORT and "…" not in numbers and (not many or count <= HANDFUL)
    names = [numbers, *coords] if is_brief else [*coords, numbers]
    if count > 1:
        ends = [f"{ranks_of(mask)[0]}…{ranks_of(mask)[-1]}"] if many and count <= FEW else []
        names += [*ends, f"{count:,} ranks", f"{count}r"]
    if many:
        names = [name if INSIDE in name else f"~{name}" for name in names]
    return tuple(dict.fromkeys(names))


def _coords(mask: Mask, colouring: Colouring, *, many: bool) -> tuple[str, ...]:
    """Return the coordinates that make up exactly this set, in full and in short; nothing where none do."""
    along = _positions(mask, colouring.mesh) if colouring.mesh is not None else {}
    if colouring.mesh is None or not along:
        return ()
    full = {axis for axis, positions in along.items() if len(positions) == colouring.mesh.axis_size(axis)}
    order = [*colouring.axes, *(axis for axis in along if axis not in colouring.axes)]
    named = [axis for axis in order if axis not in full]
    short = " ".join(f"{axis}={range_text(along[axis], '-')}" for axis in named) or "all ranks"
    if not many:
        return (short,)
    shown = [axis for axis in order if axis not in full or (axis in (colouring.axes or along) and len(along[axis]) > 1)]
    shown.sort(key=lambda axis: len(along[axis]) > 1)
    return f" {INSIDE} ".join(_along(axis, along[axis]) for axis in shown), short


def _along(axis: str, positions: list[int]) -> str:
    return f"{axis} {range_text(positions)}" if len(positions) > 1 else f"{axis}={positions[0]}"


def _positions(mask: Mask, mesh: Mesh) -> dict[str, list[int]]:
    """Return the positions along each axis whose product is exactly this set; nothing where it is not a product."""
    ranks, known = ranks_of(mask), coords_of(mesh)
    coords = [known[rank] for rank in ranks if rank in known]
    if len(coords) < len(ranks):
        return {}
    along = [set(positions) for positions in zip(*coords, strict=True)]
    if math.prod(map(len, along)) != len(ranks):
        return {}
    return {axis: sorted(positions) for axis, positions in zip(mesh.axes, along, strict=True)}


@lru_cache(maxsize=16)
def coords_of(mesh: Mesh) -> dict[int, Coord]:
    """Return the coordinate of every rank of a mesh."""
    return dict(zip(mesh.ranks, mesh.coords(), strict=True))
