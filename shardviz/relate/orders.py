"""The order of slices and regions: which of one tensor stand where in another.

There are three ways, for three situations. `orders_of_slices` compares bits and streams: it is for whole tensors of
checkpoints. `matches` compares every slice with every other one within a tolerance: it is for small tensors of a step,
which may have slices in another order or on other ranks than a split puts them (`Slices`). `orders_along` compares
features of slices, at any scale, and lets groups of ranks vote: it is for the search, which has parts of the tensor on
each rank and does not know yet what else was done to them. The search also asks which layouts give ranks the shapes
that they hold, and whose region a rank holds instead of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardviz.layout.layout import Layout
from shardviz.layout.region import indices
from shardviz.layout.splits import axes_in, lengths, numbers_in, parts_of, position_numbers
from shardviz.relate.tolerance import ALIKE
from shardviz.relate.values import BLOCK, part_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region
    from shardviz.layout.splits import Chain as Splits

    Order = NDArray[np.int64]
    Values = NDArray[Any]
    Shape = tuple[int, ...]


MAX_NUMBERS = 1 << 22
"""No more pairs of numbers than this are compared to match slices."""

SPEED = 1.1
"""By what values are multiplied before sin and cos: typical ones go around once in three standard deviations."""

MAX_BALLOTS = 8
"""Groups of ranks that vote on an order."""


def matches(values: Values, others: Values, near: float) -> NDArray[np.bool_] | None:
    """Return which row each row equals within a tolerance; None if there are too many."""
    if len(values) * others.size > MAX_NUMBERS:
        return None
    close: NDArray[np.bool_] = np.abs(values[:, None, :] - others[None, :, :]).max(axis=2) <= near
    return close


def places_of(shard: Values, whole: Values, near: float) -> tuple[int, Order] | None:
    """Return a dim, and the index in the whole of each slice of a part along it (-1: absent).

    Returns:
        The dim along which most slices are found. None if no dim has slices of the same shape in both, or if slices of
        the whole are too alike to tell them apart.

    Example:
        >>> whole = np.arange(8.0).reshape(4, 2)
        >>> places_of(np.concatenate([whole[2:], np.zeros((1, 2))]), whole, 0.0)
        (0, array([ 2,  3, -1]))
    """
    places = [(dim, at) for dim in range(shard.ndim) for at in _places(shard, whole, dim, near)]
    return max(places, key=lambda place: int(np.count_nonzero(place[1] >= 0)), default=None)


def _places(shard: Values, whole: Values, dim: int, near: float) -> Iterator[Order]:
    if shard.ndim != whole.ndim or not shard.size or not whole.size:
        return
    if any(shard.shape[axis] != whole.shape[axis] for axis in range(shard.ndim) if axis != dim):
        return
    slices, whole_slices = slices_of(shard, dim), slices_of(whole, dim)
    if slices.shape[1] < 2 or len(whole_slices) < 2 or (close := matches(slices, whole_slices, near)) is None:
        return
    if np.all(close.sum(axis=1) <= 1):
        yield np.where(close.any(axis=1), close.argmax(axis=1), -1)


def orders_of_slices(before: NDArray[Any], after: NDArray[Any]) -> list[Order] | None:
    """Return the order of a tensor's slices in a second one, dim by dim; None if unlike.

    Slices are compared by the sum of their elements' hashes, which no order within a slice changes. Both tensors are
    read twice, in blocks.

    Args:
        before: The bits of the one.
        after: Those of the other, of the same shape with at least one dim.

    Returns:
        For each dim an order with which `before[np.ix_(*orders)]` is the other; slices that are alike keep their order.

    Example:
        >>> before = np.arange(6, dtype=np.uint32).reshape(3, 2)
        >>> [order.tolist() for order in orders_of_slices(before, before[[2, 0, 1]])]
        [[2, 0, 1], [0, 1]]
    """
    long = [dim for dim, size in enumerate(before.shape) if size > 1]
    if len(long) < before.ndim:
        squeezed = orders_of_slices(before.squeeze(), after.squeeze()) if long else None
        squeezed_orders = iter(squeezed or ())
        return (
            None
            if squeezed is None
            else [next(squeezed_orders) if dim in long else np.arange(1) for dim in range(before.ndim)]
        )
    orders = [_same_hashes(*hashes) for hashes in zip(_hashes(before), _hashes(after), strict=True)]
    return orders if _is_made_of(before, after, orders) else None


def mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread hashes over 64 bits, in place: SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    return hashes


def _hashes(bits: NDArray[Any]) -> list[NDArray[np.uint64]]:
    """Return a hash of each slice along each dim: the sum of its elements' hashes."""
    hashes = [np.zeros(size, np.uint64) for size in bits.shape]
    dims = range(bits.ndim)
    for rows in _row_blocks(bits):
        values = mixed(bits[rows].astype(np.uint64) + np.uint64(1))
        for dim in dims:
            sums = values.sum(axis=tuple(axis for axis in dims if axis != dim), dtype=np.uint64)
            if dim:
                hashes[dim] += sums
            else:
                hashes[0][rows] = sums
    return hashes


def _row_blocks(bits: NDArray[Any]) -> Iterator[slice]:
    step = max(BLOCK * len(bits) // max(bits.size, 1), 1)
    for start in range(0, len(bits), step):
        yield slice(start, min(start + step, len(bits)))


def _same_hashes(before: NDArray[np.uint64], after: NDArray[np.uint64]) -> Order:
    """Return each second hash's index among the first, of two equal sets; ties in order."""
    order, after_order = np.argsort(before, kind="stable"), np.argsort(after, kind="stable")
    places = np.empty(len(order), np.int64)
    places[after_order] = order
    return places


def _is_made_of(before: NDArray[Any], after: NDArray[Any], orders: list[Order]) -> bool:
    first, *inner_orders = orders
    return all(np.array_equal(before[np.ix_(first[rows], *inner_orders)], after[rows]) for rows in _row_blocks(after))


def features(slices: Values) -> Values:
    """Return six numbers per row that rounding and the order within the row hardly change.

    They are sums of x, x^2, and sin and cos of x at two speeds: enough to tell rows apart that are drawn at random.
    """
    slow, turned = np.sin(SPEED * slices), np.cos(SPEED * slices)
    sums = [slices, np.square(slices), slow, turned, 2 * slow * turned, np.square(turned) - np.square(slow)]
    return np.stack([values.sum(1) for values in sums], 1) / math.sqrt(max(slices.shape[1], 1))


def nearest(points: Values, among: Values, nears: Sequence[float]) -> list[Order]:
    """Return each point's nearest neighbor by index, its own index first; -1 if none is near.

    Args:
        nears: How far the nearest one may be off; each gives its own indices.
    """
    if len(points) * len(among) > 1 << 17:
        return [_nearest_in_cells(points, among, near) for near in nears]
    apart, own_indices = np.abs(points[:, None] - among).max(2), np.arange(len(points))
    best = apart.argmin(1)
    places = [np.where(apart[own_indices, best] <= near, best, -1) for near in nears]
    if len(points) == len(among):
        places = [np.where(apart.diagonal() <= near, own_indices, at) for near, at in zip(nears, places, strict=True)]
    return places


def _nearest_in_cells(points: Values, among: Values, near: float) -> Order:
    """Find near points by hashed grid cells, with shifted grids for points at a cell's edge."""
    places = np.full(len(points), -1)
    if len(points) == len(among):
        places = np.where(np.abs(points - among).max(1) <= near, np.arange(len(points)), -1)
    generator = np.random.default_rng(1)
    for _ in range(8):
        unplaced = np.flatnonzero(places < 0)
        if not len(unplaced):
            break
        choices = _neighbors_in_cells(points[unplaced], among, near, generator)
        apart = np.abs(points[unplaced][:, None] - among[choices]).max(2)
        best, rows = apart.argmin(1), np.arange(len(unplaced))
        places[unplaced] = np.where(apart[rows, best] <= near, choices[rows, best], -1)
        if not (places >= 0).any():
            break
    return places


def _neighbors_in_cells(points: Values, among: Values, near: float, generator: np.random.Generator) -> Order:
    """Return four neighbors of each point, first from its cell of a randomly shifted grid."""
    shift, odd = generator.random(points.shape[1]), generator.integers(1, 1 << 62, points.shape[1])
    grid = (np.floor(side / (24 * near) + shift).clip(-1e18, 1e18).astype(np.int64) for side in (points, among))
    keys, cell_keys = ((cell * odd).sum(1) for cell in grid)
    order = np.argsort(cell_keys, kind="stable")
    first = np.searchsorted(cell_keys, keys, sorter=order)
    neighbors: Order = order[np.minimum(first[:, None] + np.arange(4), len(order) - 1)]
    return neighbors


def orders_along(
    source: Values,
    whole: Values,
    is_known: NDArray[np.bool_],
    regions: Mapping[int, Region],
    dim: int,
    nears: Sequence[float],
) -> list[tuple[int, ...]]:
    """Return orders of slices along a dim, the likeliest first; none if all are in place.

    Each group of ranks that holds the same part of all slices matches them by itself. The groups vote, and then each of
    them offers its own order.

    Args:
        whole: What ranks hold, put together, at the scale of the source.
        is_known: Which elements of it are held by any rank.
        nears: How far features of equal slices may be off, the strictest first.
    """
    shape, same = source.shape, np.arange(source.shape[dim])
    source_slices, held, there = slices_of(source, dim), slices_of(whole, dim), slices_of(is_known, dim)
    columns = _columns(shape, there, regions.values(), dim)
    orders: dict[tuple[int, ...], None] = {}
    for each in zip(*_votes(source_slices, held, there, columns, nears), strict=True):
        ballots = np.stack(each)
        counts = ((ballots[:, None] == ballots[None]) & (ballots >= 0)[:, None]).sum(1)
        vote = ballots[counts.argmax(0), same]
        filled = (np.where(places >= 0, places, np.where(vote >= 0, vote, same)) for places in (vote, *ballots))
        orders |= dict.fromkeys(tuple(order.tolist()) for order in filled if (order != same).any())
    return list(orders)


def _columns(
    shape: tuple[int, ...], is_known: NDArray[np.bool_], regions: Iterable[Region], dim: int
) -> list[NDArray[np.bool_]]:
    """Return the distinct column sets that ranks hold of each slice; those of all ranks first."""
    columns: list[NDArray[np.bool_]] = [np.asarray(is_known.all(0))]
    for other_ranges in list(dict.fromkeys(region.dims[:dim] + region.dims[dim + 1 :] for region in regions))[
        :MAX_BALLOTS
    ]:
        held = np.zeros(shape[:dim] + shape[dim + 1 :], np.bool_)
        held[np.ix_(*map(indices, other_ranges))] = True
        columns.append(held.ravel())
    return list({column.tobytes(): column for column in columns}.values())


def _votes(
    source: Values,
    whole: Values,
    is_known: NDArray[np.bool_],
    columns: Iterable[NDArray[np.bool_]],
    nears: Sequence[float],
) -> Iterator[list[Order]]:
    """Yield the places of all slices, for each set of columns and each tolerance."""
    for picked in columns:
        rows = is_known[:, picked].all(1)
        if picked.any() and rows.any():
            points, among = features(whole[:, picked]), features(source[:, picked])
            yield [np.where(rows, places, -1) for places in nearest(points, among, nears)]
            if picked.sum() == 1 and rows.all():
                yield [_sorted_alike(whole[:, picked].ravel(), source[:, picked].ravel())] * len(nears)


def _sorted_alike(values: Values, among: Values) -> Order:
    """Match single numbers by size, which rounding does not reorder."""
    places = np.empty(len(values), np.int64)
    places[np.argsort(values, kind="stable")] = np.argsort(among, kind="stable")
    return places


@dataclass(frozen=True, slots=True)
class Slices:
    """Where the slices that ranks have along one dim stand in the whole.

    Attributes:
        size: How many slices the whole has.
        places: For each rank, the place of each of its slices that is not zero padding; -1 for one of something else.
    """

    dim: int
    size: int
    places: Mapping[int, Order]

    @staticmethod
    def of(parts: Mapping[int, Values], wholes: Mapping[int, Values], near: float) -> Slices | None:
        """Return where the slices of each rank's part stand in its whole; None if that is along no dim, or several."""
        places = {rank: places_of(part, wholes[rank], near) for rank, part in parts.items()}
        located = {rank: location for rank, location in places.items() if location is not None}
        dims = {dim for dim, _ in located.values()}
        if len(located) < len(parts) or len(dims) != 1:
            return None
        dim = dims.pop()
        whole = next(iter(wholes.values()))
        is_padding = {rank: ~slices_of(parts[rank], dim).any(axis=1) & (at < 0) for rank, (_, at) in located.items()}
        return Slices(dim, whole.shape[dim], {rank: at[~is_padding[rank]] for rank, (_, at) in located.items()})

    @property
    def key(self) -> object:
        """The places, equal for slices that stand alike, along whatever dim."""
        return self.size, tuple((rank, *at.tolist()) for rank, at in self.places.items())

    @property
    def state(self) -> Literal["moved", "repeated", "odd"]:
        """`moved` if all are there, and none twice on a rank; `odd` if any is something else, or none is there."""
        every = np.concatenate(list(self.places.values()))
        if not len(every) or np.any(every < 0):
            return "odd"
        is_whole = len(set(every.tolist())) == self.size
        return (
            "moved" if is_whole and all(len(set(at.tolist())) == len(at) for at in self.places.values()) else "repeated"
        )


MOSTLY = 0.5
"""A layout is tried if it gives this part of the ranks their sizes: exchanged ones may have others."""

SEGMENTS = (2, 3)
"""Numbers of segments that are tried: gate and up, and q, k and v. Others are if they are claimed."""

FEW_ELEMENTS = 512
"""Elements of each part that are compared to find out whose it is."""


def layouts_of(
    shapes: Sequence[Shape | None], mesh: Mesh, shape: Shape, claimed: Layout | None, segments: Iterable[int] = SEGMENTS
) -> list[Layout]:
    """Return the layouts that give most ranks their shapes: the claim first, then fewest splits.

    Args:
        shapes: What each rank of the mesh holds, in mesh order; None for ranks that hold nothing.
        segments: The numbers of segments of a dim to try, besides those that are claimed.
    """
    layouts: list[Layout] = []
    if (claimed is None or claimed.flat is None) and all(held is None or len(held) == len(shape) for held in shapes):
        for ways in product(*(_splits(shapes, dim, mesh, shape[dim], claimed, segments) for dim in range(len(shape)))):
            axes = [axis for way in ways for axis in axes_in(way)]
            if len({*axes}) == len(axes):
                layouts.append(Layout(mesh, shape, ways))
        layouts.sort(key=lambda layout: sum(map(len, layout.chains)))
    if claimed is None:
        return layouts
    return [replace(claimed, partial=()), *(layout for layout in layouts if not layout.same_regions(claimed))]


def _splits(
    shapes: Sequence[Shape | None], dim: int, mesh: Mesh, size: int, claimed: Layout | None, segments: Iterable[int]
) -> list[Splits]:
    """Return the splits of a dim that give most ranks their sizes, in every order of axes."""
    there = np.array([shape is not None for shape in shapes])
    expected = np.array([-1 if shape is None else shape[dim] for shape in shapes])
    sizes, axes = mesh.sizes, mesh.long_axes
    orders = [order for count in range(len(axes) + 1) for order in permutations(axes, count)]
    numbers = {*segments, *numbers_in(claimed.chains[dim] if claimed else ())}
    behind: list[Splits] = [(number, *order) for order in orders if order for number in numbers if size % number == 0]
    distinct: dict[object, Splits] = {}
    every: list[Splits] = [*(tuple(order) for order in orders), *behind]
    for splits in every:
        if np.mean(lengths(size, splits, sizes)[there] == expected[there]) >= MOSTLY:
            coordinates = position_numbers(sizes, axes_in(splits))
            distinct.setdefault((parts_of(size, splits, sizes), coordinates.tobytes()), splits)
    return list(distinct.values())


def sources_of(
    actual: Mapping[int, Values], source: Values, layout: Layout, ranks: Collection[int], near: float
) -> tuple[tuple[int, int], ...]:
    """Return pairs of a rank and the rank whose region it holds, at any scale.

    Of several ranks that should hold what a rank holds, the one that shares most coordinates with it is taken.
    """
    holders = layout.holders()
    coord_of = layout.mesh.coord_of
    sources: dict[int, int] = {}
    for shape in {actual[rank].shape for rank in ranks} if len(holders) > 1 else ():
        regions = [region for region in holders if region.shape == shape]
        alike = [rank for rank in ranks if actual[rank].shape == shape]
        if not regions:
            continue
        points = _points([actual[rank] for rank in alike]), _points([part_of(source, region) for region in regions])
        close, coarse = nearest(*points, (near, ALIKE))
        for rank, place in zip(alike, np.where(close < 0, coarse, close).tolist(), strict=True):
            owners = holders[regions[place]] if place >= 0 else (rank,)
            sources[rank] = max(owners, key=lambda owner: sum(map(int.__eq__, coord_of(rank), coord_of(owner))))
    return tuple(sorted((rank, owner) for rank, owner in sources.items() if rank != owner))


def _points(parts: Iterable[Values]) -> NDArray[np.float64]:
    """Return features of parts that neither a factor nor its sign changes."""
    rows = [part.ravel()[:: 1 + part.size // FEW_ELEMENTS] for part in parts]
    side = np.nan_to_num(np.stack(rows).astype(np.float64))
    norms = np.linalg.norm(side, axis=1, keepdims=True) * np.where(side.sum(1, keepdims=True) < 0, -1, 1)
    return features(side / np.where(norms, norms, 1) * math.sqrt(side.shape[1]))
