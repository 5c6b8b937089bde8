"""The colours of ranks, the same in text, in pictures and in the viewer; a rank's number is always beside it.

Colours are Okabe and Ito's. Vermillion is not the colour of a rank: it marks an error.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardviz.layout.mesh import Mesh

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, YELLOW, GREY, VERMILLION = "#56b4e9", "#f0e442", "#999999", "#d55e00"

RANK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, GREY)
"""As many as a prime: steps along an axis come back to the same colour after this many, and no sooner."""

OTHER_STEP = 3
"""Colours that a step along an axis goes on where the ranks' own step would come back to the same one."""


def rank_colour(rank: int, mesh: Mesh | None = None) -> int:
    """Return the place of a rank's colour in the palette.

    It is the rank modulo the palette's length, but for meshes on which that would give neighbours one colour: there an
    axis goes on by another step. So ranks that are fewer than seven steps apart along an axis of the mesh differ, on
    every mesh; without a mesh, ranks differ unless their distance is a multiple of seven.

    Args:
        rank: The rank.
        mesh: The mesh that it is drawn on.
    """
    steps = _steps(mesh) if mesh is not None else ()
    if mesh is None or not steps or rank not in mesh:
        return rank % len(RANK_COLOURS)
    further = sum(step * position for step, position in zip(steps, mesh.coord_of(rank), strict=True))
    return (mesh.ranks[0] + further) % len(RANK_COLOURS)


def rank_style(rank: int, mesh: Mesh | None = None) -> str:
    """Return the colour of a rank."""
    return RANK_COLOURS[rank_colour(rank, mesh)]


@lru_cache(maxsize=256)
def _steps(mesh: Mesh) -> tuple[int, ...]:
    """Return how many colours further the next rank along each axis is; none where the ranks themselves give it."""
    steps = []
    for axis, size in enumerate(mesh.shape):
        second = tuple(int(other == axis and size > 1) for other in range(mesh.ndim))
        steps.append((mesh.rank_at(second) - mesh.ranks[0]) % len(RANK_COLOURS))
    in_order = mesh.ranks == tuple(range(mesh.ranks[0], mesh.ranks[0] + mesh.size))
    if in_order and all(step or size == 1 for step, size in zip(steps, mesh.shape, strict=True)):
        return ()
    return tuple(step or OTHER_STEP for step in steps)
