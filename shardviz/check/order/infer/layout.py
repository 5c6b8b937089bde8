"""The held layout in the notation, derived from what each coordinate of a mesh holds and then proved against it."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

from shardviz.check.order.infer.chain import derive_chain
from shardviz.errors import LayoutError
from shardviz.layout.layout import Layout
from shardviz.layout.region import Ranges, Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.splits import Chain

Held = dict["Coord", Region]
"""What each coordinate holds; coordinates that are not known are left out."""


def infer_layout(
    mesh: Mesh, shape: Sequence[int], held: Mapping[Coord, Region], claimed: Layout | None = None
) -> Layout | None:
    """Find the layout that puts on every coordinate what it holds.

    Args:
        mesh: The mesh.
        shape: The tensor's global shape; its number of elements as the one size for a flat view.
        held: What each known coordinate holds, in `shape`.
        claimed: What the placements say; it wins where it fits, and breaks ties.

    Returns:
        The simplest layout that fits every known coordinate exactly; None where the notation has none.
    """
    if claimed is not None and holds(claimed, held):
        return claimed
    if claimed is not None and claimed.flat is not None:
        return _flat_layout(claimed, held)
    chains: list[Chain] = []
    for dim, size in enumerate(shape):
        table = {coord: known for coord, region in held.items() if (known := _known(region, dim)) is not None}
        prefer = claimed.chains[dim] if claimed is not None and len(claimed.chains) == len(shape) else ()
        axes = _axes_that_matter(mesh, table)
        if len(held) < mesh.size:
            axes = [axis for axis in mesh.axes if axis in axes or axis in prefer]
        columns = [mesh.axis_index(axis) for axis in axes]
        by_place = {tuple(coord[column] for column in columns): ranges for coord, ranges in table.items()}
        chain = derive_chain(size, {axis: mesh.axis_size(axis) for axis in axes}, by_place, prefer)
        if chain is None:
            return None
        chains.append(chain)
    try:
        layout = Layout(mesh, tuple(shape), tuple(chains))
    except LayoutError:
        return None
    return layout if holds(layout, held) else None


def holds(layout: Layout, held: Mapping[Coord, Region]) -> bool:
    """Whether the layout gives every known coordinate what it holds; empty regions are all alike."""
    return all(same_region(layout.region(coord), region) for coord, region in held.items())


def same_region(one: Region, other: Region) -> bool:
    """Whether two regions hold the same elements in the same order."""
    return one.dims == other.dims or (one.size == 0 == other.size)


def _known(region: Region, dim: int) -> Ranges | None:
    """Return what the region says of a dim: an empty one says so only of the dims in which it is empty."""
    ranges = region.dims[dim]
    return ranges if region.size or not ranges else None


def _axes_that_matter(mesh: Mesh, table: Mapping[Coord, Ranges]) -> list[str]:
    """Return the axes along which two coordinates that differ in nothing else hold something else."""
    found = []
    for index, axis in enumerate(mesh.axes):
        seen: dict[Coord, Ranges] = {}
        for coord, ranges in table.items():
            if seen.setdefault((*coord[:index], *coord[index + 1 :]), ranges) != ranges:
                found.append(axis)
                break
    return found


def _flat_layout(claimed: Layout, held: Mapping[Coord, Region]) -> Layout | None:
    """A flat view is split by axes only, and only their order is in question."""
    for chain in _axis_orders(claimed.mesh.axes):
        layout = Layout(claimed.mesh, claimed.shape, (chain,), flat=claimed.flat)
        if holds(layout, held):
            return layout
    return None


def _axis_orders(axes: Sequence[str]) -> Iterator[Chain]:
    for count in range(len(axes) + 1):
        yield from permutations(axes, count)
