"""Find a shard's content in its reference: several neighboring values identify a place.

Values are compared as bits, so that NaN equals itself and no tolerance is guessed. Windows of neighbors along one dim
are looked up by a rolling hash of their bits; pieces shorter than a window are looked for along the other dims, and
then value by value. Whole lines are matched first. Windows that the reference has more than once follow their
neighbors; if a piece ends in the middle of one, its neighbors are extended over it, bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.orders import mixed
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.region import Region

WINDOW = 16
"""Neighbors that are looked up together."""

MIN_WINDOW = 8
"""A dim shorter than this is not cut into windows: so few neighbors are equal by chance."""

UNPLACED = 0
"""The id of an element whose place in the reference is not known."""

SAMPLES = 8
"""Lines whose first windows are looked up, to find where whole lines may lie."""

BLOCK = 1 << 20
"""Elements of the reference that are hashed at a time."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class LineTable:
    """An array as lines along its last dim.

    Attributes:
        table: Its elements, one row for each line.
        width: How many elements a window has.
    """

    table: NDArray[Any]
    width: int

    def window_starts(self) -> NDArray[np.int64]:
        """Return flat positions of windows that cover every line, the last one flush with its end."""
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


def by_windows(local: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.int64] | None:
    """Place elements by windows along the last dim; None if it is too short for any."""
    width = min(WINDOW, local.shape[-1], reference.shape[-1]) if local.ndim and local.size else 0
    if width < MIN_WINDOW:
        return None
    lines = LineTable(local.reshape(-1, local.shape[-1]), width)
    whole = LineTable(reference.reshape(-1, reference.shape[-1]), width)
    ids = _by_lines(lines, whole)
    left = np.flatnonzero((ids == UNPLACED).any(1))
    if len(left):
        lines = LineTable(lines.table[left], width)
        ids[left] = np.where(ids[left] == UNPLACED, _place_by_windows(lines, whole), ids[left])
    return ids.reshape(local.shape)


def _by_lines(local_lines: LineTable, whole: LineTable) -> NDArray[np.int64]:
    """Place lines that are one range of a reference's line: the usual case, without hashing.

    A few windows show at which columns stretches begin; then whole lines are matched.
    """
    lines, length = local_lines.table.shape
    others = whole.table.shape[1]
    ids = np.zeros(local_lines.table.shape, np.int64)
    if length > others:
        return ids
    samples = local_lines.table[np.unique(np.linspace(0, lines - 1, SAMPLES).astype(np.int64)), : local_lines.width]
    columns = {place % others for sample in samples if (place := only_place(whole, sample)) >= 0}
    for column in sorted(column for column in columns if column + length <= others):
        left = np.flatnonzero(ids[:, 0] == UNPLACED)
        stretch = whole.table[:, column : column + length]
        line = _equal_lines(local_lines.table[left], stretch)
        good = line >= 0
        ids[left[good]] = line[good, None] * others + column + 1 + np.arange(length)
    return ids


def only_place(whole: LineTable, window: NDArray[Any]) -> int:
    """Return a window's flat position in the reference; -1 unless it occurs exactly once."""
    flat = whole.table.reshape(-1)
    count = len(flat) - len(window) + 1
    places = np.flatnonzero(flat[:count] == window[0])
    for offset in range(1, len(window)):
        places = places[flat[places + offset] == window[offset]]
    places = places[whole.fits(places)]
    return int(places[0]) if len(places) == 1 else -1


def _equal_lines(lines: NDArray[Any], others: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each line the only equal one among the others; -1 if none or several are."""
    if not len(lines):
        return np.empty(0, np.int64)
    keys, wanted = line_hashes(others), line_hashes(lines)
    order = np.argsort(keys, kind="stable")
    low, high = np.searchsorted(keys[order], wanted), np.searchsorted(keys[order], wanted, "right")
    found = np.where(high == low + 1, order[np.minimum(low, len(order) - 1)], -1)
    same = (others[found] == lines).all(1)
    return np.where(same & (found >= 0), found, -1)


def line_hashes(table: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a hash of each line: the sum of its values times a random odd factor per column."""
    factors = mixed(np.arange(1, table.shape[1] + 1, dtype=np.uint64) * _FACTOR) | np.uint64(1)
    hashes = np.empty(len(table), np.uint64)
    lines = max(1, BLOCK // max(table.shape[1], 1))
    for top in range(0, len(table), lines):
        hashes[top : top + lines] = table[top : top + lines].astype(np.uint64) @ factors
    return mixed(hashes)


def _place_by_windows(lines: LineTable, whole: LineTable) -> NDArray[np.int64]:
    """Place elements by windows of their lines."""
    starts = lines.window_starts()
    places = _resolve(lines, whole, starts, *_look_up(lines, whole, starts))
    return _ids_of_windows(lines, whole, starts, places).reshape(lines.table.shape)


def _look_up(
    part: LineTable, whole: LineTable, starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a place with each window's hash, or -1, and how many places have it."""
    wanted = _rolling(part.at(starts), part.width)[:, 0]
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
    return mixed(hashes)


def _resolve(
    lines: LineTable,
    whole: LineTable,
    starts: NDArray[np.int64],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return each window's place or -1; among equal ones, the place next to a neighbor's."""
    windows = lines.at(starts)
    places = np.where((counts == 1) & _have_windows(whole, first, windows), first, -1)
    for backwards in (False, True):
        several = np.flatnonzero((places < 0) & (counts > 1))
        if not len(several):
            break
        neighbor = _nearest(places >= 0, backwards=backwards)[several]
        moved = _starts_by_neighbors(lines, whole, starts, places, several, neighbor)
        good = (neighbor >= 0) & _have_windows(whole, moved, windows[several])
        places[several[good]] = moved[good]
    return places


def _nearest(known: NDArray[np.bool_], *, backwards: bool) -> NDArray[np.int64]:
    """Return the nearest known position before each, or after it with `backwards`; -1 if none."""
    size = len(known)
    at = np.where(known, np.arange(size), -1)
    if not backwards:
        return np.maximum.accumulate(at)
    at = np.where(known, np.arange(size), size)
    found = np.minimum.accumulate(at[::-1])[::-1]
    return np.where(found == size, -1, found)


def _starts_by_neighbors(
    local_lines: LineTable,
    whole: LineTable,
    starts: NDArray[np.int64],
    places: NDArray[np.int64],
    which: NDArray[np.int64],
    neighbor: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return where windows would start if they were as far from their neighbors as in the shard."""
    length, others = local_lines.table.shape[1], whole.table.shape[1]
    lines = starts[which] // length - starts[neighbor] // length
    columns = starts[which] % length - starts[neighbor] % length
    moved: NDArray[np.int64] = places[neighbor] + lines * others + columns
    return moved


def _have_windows(whole: LineTable, places: NDArray[np.int64], windows: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the reference has the windows at these places: hashes may collide, bits do not."""
    fits = whole.fits(places)
    found = np.zeros(len(places), bool)
    found[fits] = (whole.at(places[fits]) == windows[fits]).all(1)
    return found


def _ids_of_windows(
    lines: LineTable, whole: LineTable, starts: NDArray[np.int64], places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return an id for each element: those in placed windows, and those that continue them."""
    size, length = lines.table.size, lines.table.shape[1]
    ids = np.zeros(size, np.int64)
    placed = places >= 0
    inside = np.arange(lines.width)
    ids[(starts[placed][:, None] + inside).ravel()] = (places[placed][:, None] + inside + 1).ravel()
    values, wanted = lines.table.ravel(), whole.table.reshape(-1)
    for step in (1, -1):
        _extend_ids(ids, values, wanted, (length, whole.table.shape[1]), step, 2 * WINDOW)
    return ids


def _extend_ids(
    ids: NDArray[np.int64], values: NDArray[Any], wanted: NDArray[Any], lengths: tuple[int, int], step: int, most: int
) -> None:
    """Extend placed elements to so many unplaced neighbors in one direction while the bits agree."""
    length, others = lengths
    for _ in range(most):
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


MAX_SINGLE = 1 << 22
"""The largest reference, in elements, in which single values are looked up."""

FEW_SAMPLES = 3
"""Lines per tensor whose windows are looked up in tensors of other names."""

SINGLE_BYTES = 4
"""Single values of fewer bytes are not looked up: equal ones are found by chance."""

MOSTLY = 1 / 2
"""Where a smaller part of the values that are left is found singly, they are another tensor's, and found by chance."""

FEW_EQUAL = 1 / 8
"""A smaller part of a shard's narrow values that is equal where it is claimed is so by chance."""

MOST = 1 << 16
"""Elements of a tensor in which values are looked up singly: no type that needs it has more values."""

USUAL = 3
"""Bits of a value that hardly vary: weights have the same few exponents."""

ROUNDS = 3
"""The most values in a row that the reference has several times, and that are placed anyway."""

CHANCE = 0.01
"""How likely a tensor of other values may be to pass."""


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return an array's bits as unsigned integers of the same width.

    Example:
        >>> bits_of(np.array([1.0, -0.0], np.float32)).tolist()
        [1065353216, 2147483648]
    """
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def locate(
    local: NDArray[Any], reference: NDArray[Any], claimed: Region | None = None, *, singly: bool = True
) -> NDArray[np.int64]:
    """Return where each element of a shard is in its reference.

    Args:
        local: The shard's bits, of any shape with the reference's number of dims.
        reference: The whole tensor's bits; may be mapped from a file.
        claimed: The part that the shard claims to be. It is compared first, and is the answer if the same content is
            in several places.
        singly: Whether values without a window are looked up one by one; in another tensor some are found by chance.

    Returns:
        Ids in the local shape: row-major positions in the reference, from 1; `UNPLACED` if the place is not known.

    Example:
        >>> whole = bits_of(np.arange(64, dtype=np.float32).reshape(4, 16))
        >>> locate(whole[2:], whole, Region((((0, 2),), ((0, 16),))))[:, 0].tolist()
        [33, 49]
    """
    if claimed is not None and claimed.shape == local.shape:
        wanted = part_of(reference, claimed)
        expected = claimed.flat_ids(reference.shape) + 1
        if np.array_equal(wanted, local):
            return expected
    else:
        expected = None
    ids = np.zeros(local.shape, np.int64)
    for dim, others in _orientations(local, reference):
        if not (ids == UNPLACED).any():
            break
        places = by_windows(np.moveaxis(local, dim, -1), np.moveaxis(reference, others, -1))
        if places is not None:
            places = np.moveaxis(_in_order(places, reference.shape, others), -1, dim)
            ids = np.where(ids == UNPLACED, places, ids)
    ids = _fill_gaps(local, reference, _one_by_one(local, reference, ids) if singly else ids)
    if expected is not None and (ids == UNPLACED).any():
        equal = (ids == UNPLACED) & (wanted == local)
        # Of narrow values some are equal by chance: a shard of another tensor has no element of this one.
        if local.itemsize >= SINGLE_BYTES or equal.sum() >= FEW_EQUAL * (ids == UNPLACED).sum():
            ids = np.where(equal, expected, ids)
    return ids


def has_windows_of(local: NDArray[Any], reference: NDArray[Any]) -> bool:
    """Whether a reference contains any of a few windows of a shard, before all are looked up."""
    for own, others in _orientations(local, reference):
        lines = np.moveaxis(local, own, -1).reshape(-1, local.shape[own])
        whole = np.moveaxis(reference, others, -1)
        width = min(WINDOW, lines.shape[1], whole.shape[-1])
        if width >= MIN_WINDOW and len(lines):
            table = LineTable(whole.reshape(-1, whole.shape[-1]), width)
            samples = lines[np.unique(np.linspace(0, len(lines) - 1, FEW_SAMPLES).astype(np.int64)), :width]
            if any(only_place(table, sample) >= 0 for sample in samples):
                return True
    return False


def _orientations(local: NDArray[Any], reference: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield pairs of dims to cut windows along, of shard and reference, last dims first."""
    if local.ndim != reference.ndim:
        return
    dims = range(local.ndim - 1, -1, -1)
    yield from ((dim, dim) for dim in dims)
    if local.ndim > 1:  # transposed, or each of a stack of experts
        last = local.ndim - 1
        yield from ((last, last - 1), (last - 1, last))


def _in_order(ids: NDArray[np.int64], shape: Sequence[int], dim: int) -> NDArray[np.int64]:
    """Convert positions in a reference with `dim` moved last to positions in the reference."""
    if dim == len(shape) - 1:
        return ids
    moved = np.moveaxis(np.arange(math.prod(shape), dtype=np.int64).reshape(shape), dim, -1).ravel()
    return np.where(ids == UNPLACED, UNPLACED, moved[np.maximum(ids, 1) - 1] + 1)


def _one_by_one(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place leftover values that are unique in the reference, if most of them are."""
    left = ids == UNPLACED
    if not left.any() or reference.size > MAX_SINGLE or reference.itemsize < SINGLE_BYTES:
        return ids
    values, first, counts = np.unique(reference.ravel(), return_index=True, return_counts=True)
    at = np.minimum(np.searchsorted(values, local[left]), len(values) - 1)
    good = (values[at] == local[left]) & (counts[at] == 1)
    if good.sum() < MOSTLY * good.size:
        return ids
    ids = ids.copy()
    ids[left] = np.where(good, first[at] + 1, UNPLACED)
    return ids


def _fill_gaps(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Fill a shard's gaps as a product of indices, if the reference has the same bits there."""
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
    """Return each slice's index along a dim of the reference; None unless each has exactly one."""
    others = tuple(other for other in range(place.ndim) if other != dim)
    low = np.where(gaps, np.iinfo(np.int64).max, place).min(others)
    high = np.where(gaps, -1, place).max(others)
    return np.asarray(high, np.int64) if np.array_equal(low, high) else None


def place_single_values(local: NDArray[Any], reference: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ids completed by single values; unchanged if one is absent or too few are unique.

    Args:
        local: A shard's bits.
        reference: The whole tensor's bits.
        ids: What windows showed: positions from 1, `UNPLACED` if they showed nothing.

    Example:
        >>> place_single_values(np.array([7, 5], "u2"), np.array([5, 6, 7], "u2"), np.zeros(2, np.int64)).tolist()
        [3, 1]
    """
    left = ids == UNPLACED
    if not left.any() or not 0 < reference.size <= MOST:
        return ids
    if (reference.size / 2 ** (8 * reference.itemsize - USUAL)) ** int(left.sum()) > CHANCE:
        return ids
    order = np.argsort(reference, None, kind="stable")
    values, wanted = reference.reshape(-1)[order], local[left]
    low, count = np.searchsorted(values, wanted), np.searchsorted(values, wanted, "right")
    count -= low
    once = count == 1
    places = np.where(once, order[np.minimum(low, len(order) - 1)] + 1, UNPLACED)
    used = np.concatenate([places[once], ids[~left]])
    if (count == 0).any() or 2 * once.sum() < len(once) or len(np.unique(used)) < len(used):
        return ids
    ids = ids.copy()
    ids[left] = places
    # Repeated values are placed by their neighbors: the next place in the reference must match.
    flat, values, whole = ids.reshape(-1), local.reshape(-1), reference.reshape(-1)
    for step in (1, -1):
        _extend_ids(flat, values, whole, (len(flat), len(whole)), step, ROUNDS)
    return flat.reshape(ids.shape)
