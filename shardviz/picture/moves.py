"""Where blocks went: the paths of a permutation from where the placements say each block is to where it really is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.holders import ranks_text

if TYPE_CHECKING:
    from shardviz.picture.holders import Mask
    from shardviz.picture.sides import Sides

Path = tuple["Mask", ...]
"""Sets of ranks: what the placements put on the first is on the second, and so on; a cycle ends where it began."""


def paths(sides: Sides) -> list[Path]:
    """Return the paths of all whole blocks that are elsewhere; blocks that were cut otherwise have none."""
    low = (1 << sides.shift) - 1
    blocks = [*sides.holders.regions.values(), *sides.holders.runs.values()]
    moved = {mask & low: mask >> sides.shift for mask in blocks if mask & low and mask >> sides.shift}
    moved = {claimed: held for claimed, held in moved.items() if claimed != held}
    begins = [mask for mask in moved if mask not in moved.values()]
    found = []
    for begin in [*begins, *moved]:
        if begin in moved:
            path = [begin]
            while path[-1] in moved:
                path.append(moved.pop(path[-1]))
            found.append(tuple(path))
    return found


def path_text(path: Path) -> str:
    """Write a path: `1→4→2→1`."""
    return "→".join(map(ranks_text, path))
