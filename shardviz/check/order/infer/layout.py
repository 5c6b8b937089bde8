"""The held layout in the notation, derived from what each coordinate of a mesh holds and then proved against it."""

from __future__ import annotations

from itertools import combinations, islice, permutations, product
from typing import TYPE_CHECKING

from shardviz.check.order.infer.chain import TRIES, Table, Try, derive_chain, fitting_chains
from shardviz.errors import LayoutError
from shardviz.layout.layout import Layout
from shardviz.layout.splits import JOIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.region import Ranges, Region
    from shardviz.layout.splits import Chain

MAX_AXIS_SETS = 64
MAX_LAYOUTS = 4096
"""Sets of axes of a dim, and layouts, that are tried if what is known leaves several open."""


def infer_layout(
    mesh: Mesh, shape: Sequence[int], held: Mapping[Coord, Region], claimed: Layout | None = None
) -> Layout | None:
    """Find the layout that puts on every coordinate what it holds.

    Args:
        mesh: The mesh.
        shape: The tensor's global shape; its number of elements as the one size for a flat view.
        held: What each known coordinate holds, in `shape`.
        claimed: What the placements say; it wins if it fits, and breaks ties.

    Returns:
        The simplest layout that fits every known coordinate exactly; None if the notation has none.
    """
    if claimed is not None and holds(claimed, held):
        return claimed
    if claimed is not None and claimed.flat is not None:
        return _flat_layout(claimed, held)
    tables = [_table(held, dim) for dim in range(len(shape))]
    prefer = claimed.chains if claimed is not None and len(claimed.chains) == len(shape) else ((),) * len(shape)
    chains = [
        _simplest_chain(mesh, *dim, all_known=len(held) == mesh.size) for dim in zip(shape, tables, prefer, strict=True)
    ]
    if all(chain is not None for chain in chains):
        found = _proved(mesh, shape, [chain for chain in chains if chain is not None], held)
        if found is not None:
            return found
    is_open = any(not region.size for region in held.values()) or any(
        set(_axes_that_may_matter(mesh, table)) - set(_axes_that_matter(mesh, table)) for table in tables
    )
    return _searched(mesh, shape, held, tables, prefer) if is_open else None


def _table(held: Mapping[Coord, Region], dim: int) -> dict[Coord, Ranges]:
    return {coord: known for coord, region in held.items() if (known := _known(region, dim)) is not None}


def _simplest_chain(
    mesh: Mesh, size: int, table: Mapping[Coord, Ranges], prefer: Chain, *, all_known: bool
) -> Chain | None:
    """Return the chain of a dim over the axes that are seen to matter, and over claimed ones that may."""
    axes = [axis for axis in mesh.axes if axis in _axes_that_matter(mesh, table) or (axis in prefer and not all_known)]
    return derive_chain(size, *_on_axes(mesh, axes, table), prefer)


def _on_axes(mesh: Mesh, axes: Sequence[str], table: Mapping[Coord, Ranges]) -> tuple[dict[str, int], Table]:
    """Return the sizes of some axes, and what is held at each place on them."""
    columns = [mesh.axis_index(axis) for axis in axes]
    by_place = {tuple(coord[column] for column in columns): ranges for coord, ranges in table.items()}
    return {axis: mesh.axis_size(axis) for axis in axes}, by_place


def _proved(mesh: Mesh, shape: Sequence[int], chains: Sequence[Chain], held: Mapping[Coord, Region]) -> Layout | None:
    """Return the layout of some chains if it is one, and gives every known coordinate what it holds."""
    try:
        layout = Layout(mesh, tuple(shape), tuple(chains))
    except LayoutError:
        return None
    return layout if holds(layout, held) else None


def _searched(
    mesh: Mesh,
    shape: Sequence[int],
    held: Mapping[Coord, Region],
    tables: Sequence[Mapping[Coord, Ranges]],
    prefer: Sequence[Chain],
) -> Layout | None:
    """Find a layout if missing or empty shards leave open which axes split a dim: all that may are tried."""
    for kind in TRIES:
        chains = [_open_chains(mesh, *dim, kind) for dim in zip(shape, tables, prefer, strict=True)]
        several = (found for found in islice(product(*chains), MAX_LAYOUTS) if _each_axis_once(found))
        proved = (_proved(mesh, shape, found, held) for found in sorted(several, key=_num_links))
        if layout := next((layout for layout in proved if layout is not None), None):
            return layout
    return None


def _open_chains(mesh: Mesh, size: int, table: Mapping[Coord, Ranges], prefer: Chain, kind: Try) -> list[Chain]:
    """Return the chains of a dim over the axes that are seen to matter and any of those that may, fewest axes first."""
    seen = _axes_that_matter(mesh, table)
    maybe = [axis for axis in _axes_that_may_matter(mesh, table) if axis not in seen]
    sets = [{*seen, *more} for count in range(len(maybe) + 1) for more in combinations(maybe, count)]
    chains: list[Chain] = []
    for axes in sets[:MAX_AXIS_SETS]:
        places = _on_axes(mesh, [axis for axis in mesh.axes if axis in axes], table)
        chains += fitting_chains(size, *places, prefer, kind)
    return chains


def _each_axis_once(chains: Sequence[Chain]) -> bool:
    axes = [link for chain in chains for link in chain if isinstance(link, str) and link != JOIN]
    return len(axes) == len(set(axes))


def _num_links(chains: Sequence[Chain]) -> int:
    return sum(map(len, chains))


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
    axes = []
    for index, axis in enumerate(mesh.axes):
        seen: dict[Coord, Ranges] = {}
        for coord, ranges in table.items():
            if seen.setdefault((*coord[:index], *coord[index + 1 :]), ranges) != ranges:
                axes.append(axis)
                break
    return axes


def _axes_that_may_matter(mesh: Mesh, table: Mapping[Coord, Ranges]) -> list[str]:
    """Return the axes along which no two coordinates that differ in nothing else hold the same, and not nothing.

    Chunks of a dim have no element in common: an axis that keeps a part does not split the dim.
    """
    axes = []
    for index, axis in enumerate(mesh.axes):
        known = [(*coord[:index], *coord[index + 1 :]) for coord, ranges in table.items() if ranges]
        if mesh.axis_size(axis) > 1 and len(set(known)) == len(known):
            axes.append(axis)
    return axes


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
