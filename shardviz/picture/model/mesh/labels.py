"""Sets of ranks in few characters: by number, `0-3,8`, or by their coordinates, `tp=0` or `tp=0 ▸ fsdp 0…127`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.picture.model.holders import Mask, rank_array, ranks_on, ranks_text
from shardviz.text import INSIDE, range_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.drawing import Block
    from shardviz.picture.model.palette import Coloring

LONG = 24
"""Rank numbers of more characters than this are read by nobody: how many they are says more."""

HANDFUL = 3
"""So many ranks are named by their numbers, also where they hold different parts."""

SHORT = 12
"""Rank numbers up to this many characters are written out wherever they fit."""


def ranks_label(mask: Mask, coloring: Coloring, room: int, *, many: bool = False) -> str:
    """Name a set of ranks in `room` characters, at least enough for a count.

    Args:
        mask: The ranks.
        coloring: Where they are; gives their coordinates.
        room: Characters to use at most; the count of ranks is used where nothing else fits.
        many: Whether they hold different parts, and not copies of one.
    """
    labels = rank_labels(mask, coloring, many=many)
    return next((label for label in labels if len(label) <= room), labels[-1])


def block_label(block: Block, coloring: Coloring, room: int, sign: str = "") -> str:
    """Name a block's ranks in some characters; with a sign, that all of them are wrong, or which are."""
    label = ranks_label(block.ranks, coloring, room - len(sign) - 1 if sign else room, many=block.is_mixed)
    if not sign or not block.part:
        return f"{sign} {label}" if sign else label
    parts = part_labels(block.part, block.ranks, coloring, many=block.is_mixed)
    name = rank_labels(block.ranks, coloring)[0]
    found = [*(f"{name}: {sign} {part}" for part in parts), *(f"{sign} {part}" for part in parts)]
    return next((text for text in found if len(text) <= room), sign)


@lru_cache(maxsize=1 << 14)
def rank_labels(mask: Mask, coloring: Coloring, *, many: bool = False) -> tuple[str, ...]:
    """Return the names of a set of ranks, the one that says most first, how many they are last.

    None of them says less than the whole set: where nothing else fits, `…` is all.
    """
    if not mask:
        return ("nobody",)
    numbers, count = ranks_text(mask), mask.bit_count()
    coords = _coords(mask, coloring, many=many) if count > 1 else ()
    is_brief = len(numbers) <= SHORT and "…" not in numbers and (not many or count <= HANDFUL)
    names = [numbers, *coords] if is_brief else [*coords, numbers]
    if count > 1:
        is_read = len(numbers) <= LONG and not (coords and "…" in numbers)
        names = [name for name in names if name != numbers or is_read] + [f"{count:,} ranks", "…"]
    return tuple(dict.fromkeys(names))


@lru_cache(maxsize=1 << 14)
def part_labels(part: Mask, whole: Mask, coloring: Coloring, *, many: bool = False) -> tuple[str, ...]:
    """Return the names of some of a set of ranks within it, the one that says most first: `fsdp=127`.

    Args:
        part: The ranks to name.
        whole: The set that is named beside them.
        coloring: Where they are.
        many: Whether the ranks of the set hold different parts, and not copies of one.
    """
    numbers, mesh = ranks_text(part), coloring.mesh
    inside = not part & ~whole and mesh is not None
    along, around = (_positions(mask, mesh) if inside and mesh else {} for mask in (part, whole))
    moved = [axis for axis in along if around and along[axis] != around[axis]]
    names = [numbers] if len(numbers) <= SHORT and "…" not in numbers else []
    if moved:
        coords = [" ".join(_along(axis, along[axis]) for axis in moved)]
        names = [*coords, *names] if many else [*names, *coords]
    count = f"{part.bit_count():,} of {whole.bit_count():,}" if not part & ~whole else f"{part.bit_count():,}"
    return (*names, f"{count} ranks", count) if part.bit_count() > 1 else tuple(names)


def _coords(mask: Mask, coloring: Coloring, *, many: bool) -> tuple[str, ...]:
    """Return the coordinates that make up exactly this set, in full and in short; nothing if none do."""
    along = _positions(mask, coloring.mesh) if coloring.mesh is not None else {}
    if coloring.mesh is None or not along:
        return ()
    full = {axis for axis, positions in along.items() if len(positions) == coloring.mesh.axis_size(axis)}
    order = [*coloring.axes, *(axis for axis in along if axis not in coloring.axes)]
    named = [axis for axis in order if axis not in full]
    short = " ".join(f"{axis}={range_text(along[axis], '-')}" for axis in named) or "all ranks"
    if not many:
        return (short,)
    shown = [axis for axis in order if axis not in full or (axis in (coloring.axes or along) and len(along[axis]) > 1)]
    shown.sort(key=lambda axis: len(along[axis]) > 1)
    return f" {INSIDE} ".join(_along(axis, along[axis]) for axis in shown), short


def _along(axis: str, positions: list[int]) -> str:
    return f"{axis} {range_text(positions)}" if len(positions) > 1 else f"{axis}={positions[0]}"


def _positions(mask: Mask, mesh: Mesh) -> dict[str, list[int]]:
    """Return the positions along each axis whose product is exactly this set; nothing if it is not a product."""
    coords = coords_among(mesh, rank_array(mask))
    if (coords < 0).any():
        return {}
    along = [np.flatnonzero(np.bincount(positions)).tolist() for positions in coords.T]
    return dict(zip(mesh.axes, along, strict=True)) if math.prod(map(len, along)) == len(coords) else {}


def coords_among(mesh: Mesh, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the coordinate of each of some ranks, a row for each; all -1 for one that is not on the mesh."""
    known = _coords_by_rank(mesh)
    found: NDArray[np.int64] = known[np.where((ranks >= 0) & (ranks < len(known)), ranks, len(known) - 1)]
    return found


@lru_cache(maxsize=16)
def _coords_by_rank(mesh: Mesh) -> NDArray[np.int64]:
    """Return the coordinate of every rank from 0 to the mesh's highest, and -1 for one more, which is not on it."""
    ranks = ranks_on(mesh)
    known = np.full((int(ranks.max()) + 2, mesh.ndim), -1, np.int64)
    known[ranks] = np.stack(np.unravel_index(np.arange(mesh.size), mesh.shape), axis=-1)
    return known
