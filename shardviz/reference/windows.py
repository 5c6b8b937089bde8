"""Windows of neighboring values, looked up in an array by a rolling hash of their bits.

Whole lines are matched first. Windows that the reference has more than once follow their neighbors; if a piece ends
in the middle of one, its neighbors are extended over it, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.orders import mixed

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        _extend_ids(ids, values, wanted, (length, whole.table.shape[1]), step)
    return ids


def _extend_ids(
    ids: NDArray[np.int64], values: NDArray[Any], wanted: NDArray[Any], lengths: tuple[int, int], step: int
) -> None:
    """Extend placed elements to unplaced neighbors in one direction while the bits agree."""
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
