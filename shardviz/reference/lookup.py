"""Where the content of a shard is in its reference: several neighbouring values together are as good as an id.

Values are compared as bits, so that NaN equals itself and no tolerance is guessed. Whole lines are matched first. The
rest is cut into windows of `WINDOW` neighbours along one dim, each looked up by a hash of its bits among all windows of
the reference; where a piece ends in the middle of a window, its neighbours are extended over it, bit by bit. Windows
that the reference has more than once follow their neighbours. Pieces shorter than a window are looked for along the
other dims, and then value by value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.region import Region

WINDOW = 16
"""Neighbours that are looked up together."""

MIN_WINDOW = 8
"""A dim shorter than this is not cut into windows: so few neighbours are equal by chance."""

UNPLACED = 0
"""The id of an element whose place in the reference is not known."""

MAX_SINGLE = 1 << 22
"""The largest reference, in elements, in which single values are looked up."""

FEW_SAMPLES = 3
"""Lines of which a window is looked up in tensors of other names."""

SAMPLES = 8
"""Lines whose first windows are looked up, to find where whole lines may lie."""

SINGLE_BYTES = 4
"""Single values of fewer bytes are not looked up: equal ones are found by chance."""

FEW_EQUAL = 1 / 8
"""A smaller part of a shard's narrow values that is equal where it is claimed is so by chance."""

BLOCK = 1 << 20
"""Elements of the reference that are hashed at a time."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return an array's bits as unsigned integers of the same width.

    Example:
        >>> bits_of(np.array([1.0, -0.0], np.float32)).tolist()
        [1065353216, 2147483648]
    """
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def is_alike(bits: NDArray[Any]) -> bool:
    """Whether all elements are the same: such content says nothing about where it belongs."""
    return bits.size == 0 or bool((bits == bits.flat[0]).all())


def read_region(reference: NDArray[Any], region: Region) -> NDArray[Any]:
    """Return the elements of a reference that a region covers, in the region's order."""
    if all(len(ranges) == 1 for ranges in region.dims):
        return reference[tuple(slice(*ranges[0]) for ranges in region.dims)]
    whole = reference
    for dim, ranges in enumerate(region.dims):
        parts = [whole[(slice(None),) * dim + (slice(*pair),)] for pair in ranges]
        whole = np.concatenate(parts, dim) if parts else np.take(whole, [], dim)
    return whole


def locate(
    local: NDArray[Any], reference: NDArray[Any], claimed: Region | None = None, *, singly: bool = True
) -> NDArray[np.int64]:
    """Return where each element of a shard is in its reference.

    Args:
        local: The shard's bits, of any shape with the reference's number of dims.
        reference: The whole tensor's bits; may be mapped from a file.
        claimed: The part that the shard claims to be. It is compared first, and is the answer where the same content is
            in several places.
        singly: Whether values without a window are looked up one by one; in another tensor some are found by chance.

    Returns:
        Ids in the local shape: row-major positions in the reference, from 1; `UNPLACED` where the place is not known.

    Example:
        >>> whole = bits_of(np.arange(64, dtype=np.float32).reshape(4, 16))
        >>> locate(whole[2:], whole, Region((((0, 2),), ((0, 16),))))[:, 0].tolist()
        [33, 49]
    """
    if claimed is not None and claimed.shape == local.shape:
        wanted = read_region(reference, claimed)
        expected = claimed.flat_ids(reference.shape) + 1
        if np.array_equal(wanted, local):
            return expected
    else:
        expected = None
    ids = np.zeros(local.shape, np.int64)
    for own, others in _orientations(local, reference):
        if not (ids == UNPLACED).any():
            break
        found = _by_windows(np.moveaxis(local, own, -1), np.moveaxis(reference, others, -1))
        if found is not None:
            found = np.moveaxis(_in_order(found, reference.shape, others), -1, own)
            ids = np.where(ids == UNPLACED, found, ids)
    ids = _completed(local, reference, _one_by_one(local, reference, ids) if singly else ids)
    if expected is not None and (ids == UNPLACED).any():
        equal = (ids == UNPLACED) & (wanted == local)
        # Of narrow values some are equal by chance: a shard of another tensor has no element of this one.
        if local.itemsize >= SINGLE_BYTES or equal.sum() >= FEW_EQUAL * (ids == UNPLACED).sum():
            ids = np.where(equal, expected, ids)
    return ids


def has_windows_of(local: NDArray[Any], reference: NDArray[Any]) -> bool:
    """Whether a reference has any of a few windows of a shard: asked before all of them are looked for."""
    for own, others in _orientations(local, reference):
        lines = np.moveaxis(local, own, -1).reshape(-1, local.shape[own])
        whole = np.moveaxis(reference, others, -1)
        width = min(WINDOW, lines.shape[1], whole.shape[-1])
        if width >= MIN_WINDOW and len(lines):
            table = _Lines(whole.reshape(-1, whole.shape[-1]), width)
            samples = lines[np.unique(np.linspace(0, len(lines) - 1, FEW_SAMPLES).astype(np.int64)), :width]
            if any(_only_place(table, sample) >= 0 for sample in samples):
                return True
    return False


def _orientations(local: NDArray[Any], reference: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield the dims along which windows are cut, of the shard and of the reference: the last ones first."""
    if local.ndim != reference.ndim:
        return
    dims = range(local.ndim - 1, -1, -1)
    yield from ((dim, dim) for dim in dims)
    if local.ndim == 2:
        yield from ((1, 0), (0, 1))


def _in_order(ids: NDArray[np.int64], shape: Sequence[int], dim: int) -> NDArray[np.int64]:
    """Turn positions in a reference whose dim `dim` was moved last into positions in the reference itself."""
    if dim == len(shape) - 1:
        return ids
    moved = np.moveaxis(np.arange(math.prod(shape), dtype=np.int64).reshape(shape), dim, -1).ravel()
    return np.where(ids == UNPLACED, UNPLACED, moved[np.maximum(ids, 1) - 1] + 1)


@dataclass(frozen=True)
class _Lines:
    """An array as lines along its last dim.

    Attributes:
        table: Its elements, one row for each line.
        width: How many elements a window has.
    """

    table: NDArray[Any]
    width: int

    def window_starts(self) -> NDArray[np.int64]:
        """Return the flat positions of windows that cover every line: side by side, the last one flush with the end."""
        lines, length = self.table.shape
        columns = np.unique(np.append(np.arange(0, length - self.width + 1, self.width), length - self.width))
        starts: NDArray[np.int64] = (np.arange(lines)[:, None] * length + columns).ravel()
        return starts

    def at(self, starts: NDArray[np.int64]) -> NDArray[Any]:
        """Return the windows that start at flat positions, one row for each."""
        lines, columns = np.divmod(starts, self.table.shape[1])
        windows: NDArray[Any] = self.table[lines[:, None], columns[:, None] + np.arange(self.width)]
        return windows

    def fits(self, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a window that starts at a flat position lies within its line."""
        room = self.table.shape[1] - self.width
        inside: NDArray[np.bool_] = (starts >= 0) & (starts < self.table.size) & (starts % self.table.shape[1] <= room)
        return inside


def _by_windows(local: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.int64] | None:
    """Place elements by windows along the last dim; None where it is too short for any."""
    width = min(WINDOW, local.shape[-1], reference.shape[-1]) if local.ndim and local.size else 0
    if width < MIN_WINDOW:
        return None
    own = _Lines(local.reshape(-1, local.shape[-1]), width)
    whole = _Lines(reference.reshape(-1, reference.shape[-1]), width)
    ids = _by_lines(own, whole)
    left = np.flatnonzero((ids == UNPLACED).any(1))
    if len(left):
        own = _Lines(own.table[left], width)
        ids[left] = np.where(ids[left] == UNPLACED, _windowed(own, whole), ids[left])
    return ids.reshape(local.shape)


def _by_lines(own: _Lines, whole: _Lines) -> NDArray[np.int64]:
    """Place lines that are one stretch of a line of the reference. This is the usual case, and hashes no windows.

    A few windows show at which columns stretches begin; then whole lines are matched.
    """
    lines, length = own.table.shape
    others = whole.table.shape[1]
    ids = np.zeros(own.table.shape, np.int64)
    if length > others:
        return ids
    samples = own.table[np.unique(np.linspace(0, lines - 1, SAMPLES).astype(np.int64)), : own.width]
    columns = {place % others for sample in samples if (place := _only_place(whole, sample)) >= 0}
    for column in sorted(column for column in columns if column + length <= others):
        left = np.flatnonzero(ids[:, 0] == UNPLACED)
        stretch = whole.table[:, column : column + length]
        line = _matched(own.table[left], stretch)
        good = line >= 0
        ids[left[good]] = line[good, None] * others + column + 1 + np.arange(length)
    return ids


def _only_place(whole: _Lines, window: NDArray[Any]) -> int:
    """Return the flat position of the reference's only such window; -1 where it has none, or more than one."""
    flat = whole.table.reshape(-1)
    count = len(flat) - len(window) + 1
    places = np.flatnonzero(flat[:count] == window[0])
    for offset in range(1, len(window)):
        places = places[flat[places + offset] == window[offset]]
    places = places[whole.fits(places)]
    return int(places[0]) if len(places) == 1 else -1


def _matched(lines: NDArray[Any], others: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each line the only one of the others that is equal to it, -1 where there is none or more than one."""
    if not len(lines):
        return np.empty(0, np.int64)
    keys, wanted = line_hashes(others), line_hashes(lines)
    order = np.argsort(keys, kind="stable")
    low, high = np.searchsorted(keys[order], wanted), np.searchsorted(keys[order], wanted, "right")
    found = np.where(high == low + 1, order[np.minimum(low, len(order) - 1)], -1)
    same = (others[found] == lines).all(1)
    return np.where(same & (found >= 0), found, -1)


def line_hashes(table: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a hash of each line: the sum of its values times odd factors that differ from column to column."""
    factors = _mixed(np.arange(1, table.shape[1] + 1, dtype=np.uint64) * _FACTOR) | np.uint64(1)
    hashes = np.empty(len(table), np.uint64)
    lines = max(1, BLOCK // max(table.shape[1], 1))
    for top in range(0, len(table), lines):
        hashes[top : top + lines] = table[top : top + lines].astype(np.uint64) @ factors
    return _mixed(hashes)


def _windowed(own: _Lines, whole: _Lines) -> NDArray[np.int64]:
    """Place elements by windows of their lines."""
    starts = own.window_starts()
    places = _resolved(own, whole, starts, *_looked_up(own, whole, starts))
    return _extended(own, whole, starts, places).reshape(own.table.shape)


def _looked_up(own: _Lines, whole: _Lines, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each window one place in the reference with the same hash, or -1; and how many there are."""
    wanted = _hashed(own.at(starts))
    keys, back = np.unique(wanted, return_inverse=True)
    table = np.zeros(1 << 16, bool)
    table[keys >> np.uint64(48)] = True
    first = np.full(len(keys), -1, np.int64)
    counts = np.zeros(len(keys), np.int64)
    length = whole.table.shape[1]
    lines = max(1, BLOCK // length)
    for top in range(0, len(whole.table), lines):
        hashes = _rolling(whole.table[top : top + lines], whole.width)
        line, column = np.nonzero(table[hashes >> np.uint64(48)])
        candidates = hashes[line, column]
        at = np.minimum(np.searchsorted(keys, candidates), len(keys) - 1)
        hit = keys[at] == candidates
        np.add.at(counts, at[hit], 1)
        flat = (line[hit] + top) * length + column[hit]
        fresh = first[at[hit]] < 0
        first[at[hit][fresh][::-1]] = flat[fresh][::-1]
    return first[back], counts[back]


def _rolling(table: NDArray[Any], width: int) -> NDArray[np.uint64]:
    """Return the hash of every window of every line."""
    count = table.shape[1] - width + 1
    hashes = np.zeros((len(table), count), np.uint64)
    for offset in range(width):
        hashes *= _FACTOR
        hashes += table[:, offset : offset + count].astype(np.uint64) + np.uint64(offset + 1)
    return _mixed(hashes)


def _hashed(windows: NDArray[Any]) -> NDArray[np.uint64]:
    return _rolling(windows, windows.shape[1])[:, 0]


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread hashes over all 64 bits (the finalizer of splitmix64)."""
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    return hashes


def _resolved(
    own: _Lines,
    whole: _Lines,
    starts: NDArray[np.int64],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the place of each window or -1: of several that look alike, the one beside a neighbour's."""
    windows = own.at(starts)
    places = np.where((counts == 1) & _same(whole, first, windows), first, -1)
    for backwards in (False, True):
        several = np.flatnonzero((places < 0) & (counts > 1))
        if not len(several):
            break
        neighbour = _nearest(places >= 0, backwards=backwards)[several]
        moved = _follow(own, whole, starts, places, several, neighbour)
        good = (neighbour >= 0) & _same(whole, moved, windows[several])
        places[several[good]] = moved[good]
    return places


def _nearest(known: NDArray[np.bool_], *, backwards: bool) -> NDArray[np.int64]:
    """Return for each position the nearest known one before it, or after it; -1 where there is none."""
    size = len(known)
    at = np.where(known, np.arange(size), -1)
    if not backwards:
        return np.maximum.accumulate(at)
    at = np.where(known, np.arange(size), size)
    found = np.minimum.accumulate(at[::-1])[::-1]
    return np.where(found == size, -1, found)


def _follow(
    own: _Lines,
    whole: _Lines,
    starts: NDArray[np.int64],
    places: NDArray[np.int64],
    which: NDArray[np.int64],
    neighbour: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return where windows would start if they were as far from their neighbours as in the shard."""
    length, others = own.table.shape[1], whole.table.shape[1]
    lines = starts[which] // length - starts[neighbour] // length
    columns = starts[which] % length - starts[neighbour] % length
    moved: NDArray[np.int64] = places[neighbour] + lines * others + columns
    return moved


def _same(whole: _Lines, places: NDArray[np.int64], windows: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the reference has the windows at these places: hashes may collide, bits do not."""
    fits = whole.fits(places)
    found = np.zeros(len(places), bool)
    found[fits] = (whole.at(places[fits]) == windows[fits]).all(1)
    return found


def _extended(own: _Lines, whole: _Lines, starts: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return an id for each element: those of placed windows, and of what continues them bit by bit."""
    size, length = own.table.size, own.table.shape[1]
    ids = np.zeros(size, np.int64)
    placed = places >= 0
    inside = np.arange(own.width)
    ids[(starts[placed][:, None] + inside).ravel()] = (places[placed][:, None] + inside + 1).ravel()
    values, wanted = own.table.ravel(), whole.table.reshape(-1)
    for step in (1, -1):
        _extend(ids, values, wanted, (length, whole.table.shape[1]), step)
    return ids


def _extend(
    ids: NDArray[np.int64], values: NDArray[Any], wanted: NDArray[Any], lengths: tuple[int, int], step: int
) -> None:
    """Continue what is placed over its unplaced neighbours, in one direction, for as long as the bits agree."""
    length, others = lengths
    for _ in range(2 * WINDOW):
        open_ = np.flatnonzero(ids == UNPLACED)
        from_ = open_ - step
        inner = (from_ >= 0) & (from_ < len(ids)) & (from_ // length == open_ // length)
        open_, from_ = open_[inner], from_[inner]
        from_, open_ = from_[ids[from_] != UNPLACED], open_[ids[from_] != UNPLACED]
        place = ids[from_] - 1 + step
        stays = (place >= 0) & (place < len(wanted)) & (place // others == (ids[from_] - 1) // others)
        open_, place = open_[stays], place[stays]
        good = wanted[place] == values[open_]
        if not good.any():
            return
        ids[open_[good]] = place[good] + 1


def _one_by_one(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place what is left by single values, as far as the reference has each only once."""
    left = ids == UNPLACED
    if not left.any() or reference.size > MAX_SINGLE or reference.itemsize < SINGLE_BYTES:
        return ids
    values, first, counts = np.unique(reference.ravel(), return_index=True, return_counts=True)
    at = np.minimum(np.searchsorted(values, local[left]), len(values) - 1)
    good = (values[at] == local[left]) & (counts[at] == 1)
    ids = ids.copy()
    ids[left] = np.where(good, first[at] + 1, UNPLACED)
    return ids


def _completed(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Fill gaps of a shard that is otherwise a product of indices, where the reference has the same bits there."""
    gaps = ids == UNPLACED
    if not gaps.any() or gaps.all() or local.ndim != reference.ndim:
        return ids
    places = np.unravel_index(np.maximum(ids, 1) - 1, reference.shape)
    lists = [_indices_along(place, gaps, dim) for dim, place in enumerate(places)]
    if any(found is None for found in lists):
        return ids
    wanted = np.ix_(*(found for found in lists if found is not None))
    whole = np.ravel_multi_index(np.broadcast_arrays(*wanted), reference.shape) + 1
    return np.where(gaps & (reference[wanted] == local), whole, ids)


def _indices_along(place: NDArray[np.intp], gaps: NDArray[np.bool_], dim: int) -> NDArray[np.int64] | None:
    """Return the index that each slice along a dim has in the reference; None where a slice has none, or several."""
    others = tuple(other for other in range(place.ndim) if other != dim)
    low = np.where(gaps, np.iinfo(np.int64).max, place).min(others)
    high = np.where(gaps, -1, place).max(others)
    return np.asarray(high, np.int64) if np.array_equal(low, high) else None
