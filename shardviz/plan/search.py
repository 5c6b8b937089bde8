"""Meshes of a number of ranks: every way to share them out over the axes of a probe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.layout.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_MESHES = 64
"""Meshes that are planned at most: each takes seconds."""


def meshes(axes: Sequence[str], gpus: int, node: int = 0) -> list[Mesh]:
    """Return the meshes of so many ranks, those that are likely first.

    Likely is what keeps the inner axes, whose groups talk most, within a node: an axis called tp, cp or sp is no wider
    than a node where nodes are known.

    Example:
        >>> [str(mesh) for mesh in meshes(("dp", "tp"), 4)]
        ['(dp=4, tp=1)', '(dp=2, tp=2)', '(dp=1, tp=4)']
    """
    found = [Mesh(tuple(axes), sizes) for sizes in _shared(gpus, len(axes))]
    return sorted(found, key=lambda mesh: (_wide(mesh, node), mesh.shape[-1]))


def _wide(mesh: Mesh, node: int) -> bool:
    return bool(node) and any(
        size > node for axis, size in zip(mesh.axes, mesh.shape, strict=True) if axis in ("tp", "cp", "sp")
    )


def _shared(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a product of so many others."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _shared(number // first, parts - 1):
                yield (first, *rest)
