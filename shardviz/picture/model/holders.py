"""Which ranks hold which part of a tensor, queried one window at a time; all maps use this.

Nothing is laid out per element. A rank's region is a product of index ranges, so along one dim every index has a set
of ranks, and an element is held by the ranks in the sets of all its indices. Ids that aren't such a product (the
stretches of FSDP1, permuted elements) are kept as runs of row-major indices. A set of ranks is an integer with one bit
per rank.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.text import cut_at_comma, join_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Ranges, Region

    Indices = NDArray[np.int64]
    Spans = NDArray[np.int64]
    """Index ranges `(start, stop)`, in the last dim of the array."""

Mask = int
"""A set of ranks: bit r is rank r."""

Masks = frozenset[Mask]


@lru_cache(maxsize=1 << 14)
def ranks_of(mask: Mask) -> tuple[int, ...]:
    """Return the ranks of a set, rising."""
    if mask.bit_count() == 1:
        return (mask.bit_length() - 1,)
    return tuple(rank_array(mask).tolist())


@lru_cache(maxsize=16)
def rank_array(mask: Mask) -> Indices:
    """Return the ranks of a set, rising, for what is worked out for thousands of them at once."""
    bits = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), np.uint8)
    found = np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))
    found.flags.writeable = False
    return found


@lru_cache(maxsize=64)
def ranks_on(mesh: Mesh) -> Indices:
    """Return the rank at every coordinate of a mesh, row-major."""
    found = np.array(mesh.ranks, np.int64)
    found.flags.writeable = False
    return found


def mask_of(ranks: Iterable[int] | Indices) -> Mask:
    """Return ranks as a set."""
    known = ranks if isinstance(ranks, np.ndarray) else np.array([*ranks], np.int64)
    if len(known) == 1:
        return 1 << int(known[0])
    bits = np.zeros(int(known.max(initial=0)) + 1, np.bool_)
    bits[known] = True
    return mask_of_flags(bits)


def mask_of_flags(bits: NDArray[np.bool_]) -> Mask:
    """Return the ranks whose flags are set; that of rank 0 is the first."""
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


@lru_cache(maxsize=1 << 14)
def ranks_text(mask: Mask) -> str:
    """Write a set of ranks briefly: `0-3,8`."""
    return join_numbers(ranks_of(mask), ",")


def ranks_in_words(ranks: Sequence[int], most: int = sys.maxsize) -> str:
    """Name ranks in about `most` characters: `rank 3`, `ranks 0-3,8,...`, or their number."""
    numbers = ranks_text(mask_of(ranks))
    if len(numbers) > most and "," not in numbers[:most]:
        return f"{len(ranks):,} ranks"
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {cut_at_comma(numbers, most)}"


@dataclass(frozen=True, eq=False)
class Stripes:
    """A line of indices cut into stripes of equal holders.

    Attributes:
        edges: Where the stripes begin, rising, and where the last one ends.
        kinds: For each stripe an index into `masks`; neighbors differ.
        masks: The distinct sets of ranks.
    """

    edges: Indices
    kinds: Indices
    masks: Sequence[Mask]

    @classmethod
    def of(cls, size: int, held: Iterable[tuple[Ranges, Mask]]) -> Stripes:
        """Lay ranges over one another on a line of `size` indices."""
        covers = [(start, stop, mask) for ranges, mask in held for start, stop in ranges if start < stop]
        cuts = np.unique(np.array([0, size, *(edge for start, stop, _ in covers for edge in (start, stop))], np.int64))
        masks = [0] * max(len(cuts) - 1, 0)
        lows = np.searchsorted(cuts, [start for start, _, _ in covers])
        highs = np.searchsorted(cuts, [stop for _, stop, _ in covers])
        for (_, _, mask), low, high in zip(covers, lows.tolist(), highs.tolist(), strict=True):
            for stripe in range(low, high):
                masks[stripe] |= mask
        kind_of: dict[Mask, int] = {}
        kinds = np.array([kind_of.setdefault(mask, len(kind_of)) for mask in masks], np.int64)
        first = np.flatnonzero(np.diff(kinds, prepend=-1))
        return cls(np.append(cuts[:-1][first], cuts[-1:]), kinds[first], tuple(kind_of))

    def over(self, spans: Spans) -> tuple[Indices, list[Masks]]:
        """Sum up spans of the line.

        Args:
            spans: `(start, stop)` in the last dim; none is empty.

        Returns:
            For each span an index into the list, and the sets of ranks that its indices have.
        """
        low = np.searchsorted(self.edges, spans[..., 0], side="right") - 1
        high = np.searchsorted(self.edges, spans[..., 1] - 1, side="right") - 1
        pairs, index = np.unique(low * len(self.edges) + high, return_inverse=True)
        return index.reshape(low.shape), [self._masks(*divmod(pair, len(self.edges))) for pair in pairs.tolist()]

    def lowest(self, shift: int, low: Mask) -> Indices:
        """Return the lowest rank of each kind on one side; -1 if nobody holds it there.

        Args:
            shift: Where the side's ranks begin in the masks.
            low: The bits of a side's ranks.
        """
        masks = [mask >> shift & low for mask in self.masks]
        return np.array([(mask & -mask).bit_length() - 1 for mask in masks], np.int64)

    def claim_edges(self, low: Mask) -> Indices:
        """Return where the ranks that should hold the line change; `low` is that of `lowest`."""
        due = [mask & low for mask in self.masks]
        numbers = {mask: number for number, mask in enumerate(dict.fromkeys(due))}
        codes = np.array([numbers[mask] for mask in due], np.int64)[self.kinds]
        return np.append(self.edges[:-1][np.flatnonzero(np.diff(codes, prepend=-1))], self.edges[-1:])

    def _masks(self, first: int, last: int) -> Masks:
        return frozenset(self.masks[kind] for kind in np.unique(self.kinds[first : last + 1]).tolist())


@dataclass(frozen=True, slots=True)
class Plane:
    """The two dims that are drawn, and the index at which each other dim is cut.

    Attributes:
        rows: The dim that runs downwards.
        cols: The dim that runs to the right.
        at: An index for every dim; those of `rows` and `cols` are not looked at.
    """

    rows: int
    cols: int
    at: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """The holders of a grid of cells; a cell covers one element or many.

    Attributes:
        codes: For each cell an index into `masks`; shape (rows, cols).
        masks: The sets of ranks that the elements of a cell have: one if all have the same.
    """

    codes: Indices
    masks: tuple[Masks, ...]


@dataclass(frozen=True, eq=False)
class Holders:
    """Who holds which elements of a tensor.

    Attributes:
        shape: The tensor's shape with 1s put before it up to two dims, so that all maps are grids.
        regions: The ranks that hold each product of ranges.
        runs: The ranks that hold each stretch of row-major indices, if it is not a product of ranges.
    """

    shape: tuple[int, ...]
    regions: Mapping[Region, Mask]
    runs: Mapping[Ranges, Mask]

    @cached_property
    def dims(self) -> tuple[Stripes, ...]:
        """The stripes of each dim, from the products alone."""
        missing = len(self.shape) - min((len(region.dims) for region in self.regions), default=len(self.shape))
        stripes = []
        for dim, size in enumerate(self.shape):
            of_ranges: dict[Ranges, Mask] = {}
            for region, mask in self.regions.items():
                ranges = region.dims[dim - missing] if dim >= missing else ((0, 1),)
                of_ranges[ranges] = of_ranges.get(ranges, 0) | mask
            stripes.append(Stripes.of(size, of_ranges.items()))
        return tuple(stripes)

    @cached_property
    def line(self) -> Stripes:
        """The stripes of the row-major line, from the runs alone."""
        return Stripes.of(math.prod(self.shape), self.runs.items())

    def edges(self, dim: int) -> Indices:
        """Return where the holders may change along a dim, its two ends included."""
        edges = [self.dims[dim].edges]
        if self.runs:
            stride, size = math.prod(self.shape[dim + 1 :]), self.shape[dim]
            inner = self.line.edges[1:-1]
            if len(inner) <= size:
                at = inner // stride % size
                exact = inner % stride == 0
                edges += [at, np.minimum(at[~exact] + 1, size)]
        return np.unique(np.concatenate(edges))

    def window(self, plane: Plane, rows: Spans, cols: Spans) -> Window:
        """Return the holders of a grid of cells.

        Runs count by the stretch from a cell's first element to its last, so a cell of several rows may name ranks that
        hold only what lies between them.

        Args:
            plane: The dims drawn.
            rows: `(start, stop)` of each row of cells; none is empty.
            cols: `(start, stop)` of each column of cells.
        """
        if not self.runs:
            return self._of_regions(plane, rows, cols)
        # Cut where the holders of products change: a cell that crosses them has the pairs that occur, not all pairs.
        bands, owners = _cut_spans(rows, self.dims[plane.rows].edges)
        window = _overlay(self._of_regions(plane, bands, cols), self._of_runs(plane, bands, cols))
        return window if len(bands) == len(rows) else _merge_rows(window, owners)

    def at(self, index: Sequence[int]) -> Mask:
        """Return the ranks that hold one element, given by its index in `shape`."""
        plane = Plane(len(self.shape) - 2, len(self.shape) - 1, tuple(index))
        rows, cols = (np.array([[at, at + 1]]) for at in index[-2:])
        window = self.window(plane, rows, cols)
        (mask,) = window.masks[int(window.codes[0, 0])]
        return mask

    def _of_regions(self, plane: Plane, rows: Spans, cols: Spans) -> Window:
        down, of_rows = self.dims[plane.rows].over(rows)
        right, of_cols = self.dims[plane.cols].over(cols)
        others = self._other_dims(plane)
        masks = tuple(
            frozenset(one & other & others for one, other in product(row, col))
            for row, col in product(of_rows, of_cols)
        )
        return Window(np.add.outer(down * len(of_cols), right), masks)

    def _other_dims(self, plane: Plane) -> Mask:
        mask = -1
        for dim, (stripes, at) in enumerate(zip(self.dims, plane.at, strict=True)):
            if dim not in (plane.rows, plane.cols):
                _, ((only,),) = stripes.over(np.array([[at, at + 1]]))
                mask &= only
        return mask

    def _of_runs(self, plane: Plane, rows: Spans, cols: Spans) -> Window:
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        others = set(range(len(self.shape))) - {plane.rows, plane.cols}
        base = sum(plane.at[dim] * strides[dim] for dim in others)
        down, right = strides[plane.rows], strides[plane.cols]
        first = base + np.add.outer(rows[:, 0] * down, cols[:, 0] * right)
        last = base + np.add.outer((rows[:, 1] - 1) * down, (cols[:, 1] - 1) * right)
        codes, masks = self.line.over(np.stack([first, last + 1], axis=-1))
        return Window(codes, tuple(masks))


def _overlay(window: Window, other: Window) -> Window:
    """Lay two windows over each other."""
    pairs, codes = np.unique(window.codes * len(other.masks) + other.codes, return_inverse=True)
    at = [divmod(pair, len(other.masks)) for pair in pairs.tolist()]
    masks = tuple(
        frozenset(a | b for a, b in product(window.masks[first], other.masks[second])) for first, second in at
    )
    return Window(codes.reshape(window.codes.shape), masks)


def _cut_spans(spans: Spans, edges: Indices) -> tuple[Spans, Indices]:
    """Cut spans at edges; return the parts in order and the index of each span's first part."""
    parts: list[tuple[int, int]] = []
    owners: list[int] = []
    for start, stop in spans.tolist():
        inner = edges[np.searchsorted(edges, start, side="right") : np.searchsorted(edges, stop)].tolist()
        owners.append(len(parts))
        parts += pairwise([start, *inner, stop])
    return np.array(parts, np.int64).reshape(-1, 2), np.array(owners, np.int64)


def _merge_rows(window: Window, owners: Indices) -> Window:
    """Sum up neighboring rows of cells; `owners` are the first of each sum."""
    index: dict[tuple[int, ...], int] = {}
    codes = [
        [index.setdefault(tuple(np.unique(column).tolist()), len(index)) for column in rows.T]
        for rows in np.split(window.codes, owners[1:])
    ]
    return Window(
        np.array(codes, np.int64).reshape(len(owners), window.codes.shape[1]),
        tuple(frozenset().union(*(window.masks[code] for code in own)) for own in index),
    )
