"""Tensors that are longer on one side: padded, cut off, or with repeated parts.

A tensor that is one number everywhere fits several of these. The other tensors then decide, if one of them shows by its
content that the longer side repeats, or keeps, as many equal parts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.explain.checkpoints.conversion import (
    CutOffEnd,
    KeptOneShard,
    LostSlices,
    PaddedEnd,
    PaddedParts,
    RepeatedHeads,
)
from shardviz.explain.checkpoints.files import OverwrittenParts
from shardviz.groups import the_only
from shardviz.reference.lookup import line_hashes
from shardviz.relate.values import is_alike
from shardviz.text import join_numbers

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome, Outcomes
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.explain.cause import Cause

    _Lengths = tuple[int, int]

MAX_RANKS = 1024
"""Ranks that may each have padded their own part."""

FEWEST_KEPT = 4
"""Slices that both sides have in one order, so that the others are lost or new."""


def explain_padding(
    outcome: Outcome, mine: NDArray[Any], theirs: NDArray[Any], names: tuple[str, str]
) -> Outcome | None:
    """Say which side has more at the end of one dim, and is else equal; None if neither is that."""
    if (longer := _longer(mine, theirs)) is None:
        return None
    dim, is_longer, short, long = longer
    size, rest = len(short), long[len(short) :]
    if not np.array_equal(long[:size], short):
        return _padding_between(outcome, dim, short, long, names[is_longer])
    what = "all zero" if not rest.any() else "all alike" if is_alike(rest) else "not alike"
    first = "index" if size == 1 else f"{size:,} indices"
    why = f"equal in the first {first} of dim {dim}; {names[is_longer]} has {len(rest):,} more, {what}"
    times = len(long) // size if len(long) % size == 0 and is_alike(long) else 0
    is_parts = 1 < times <= MAX_RANKS
    why += f": {times:,} equal parts in all" if is_parts else ""
    if not is_longer:
        return outcome.became("padded", why, KeptOneShard(times) if is_parts else CutOffEnd())
    is_plain = what != "not alike"
    call = f"pad(NAME, {len(long)}{f', {dim}' if dim else ''})" if is_plain and not outcome.is_made else ""
    padded = PaddedEnd(is_plain, call)
    return outcome.became("padded", why, RepeatedHeads(times, padded) if is_parts else padded)


def _padding_between(outcome: Outcome, dim: int, short: NDArray[Any], long: NDArray[Any], name: str) -> Outcome | None:
    """Explain that one side was padded shard by shard, with torch's chunk sizes."""
    size = len(long)
    for ranks in [count for count in range(2, min(size, MAX_RANKS) + 1) if size % count == 0]:
        room, part = size // ranks, -(-len(short) // ranks)
        starts = range(0, len(short), part)
        parts = ((short[at : at + part], long[at // part * room :]) for at in starts)
        if part < room and all(np.array_equal(own, there[: len(own)]) for own, there in parts):
            more = "1 more index" if room - part == 1 else f"{room - part:,} more indices"
            why = f"{name} has {more} of dim {dim} behind every {part:,}"
            return outcome.became("padded", why, PaddedParts(ranks))
    return None


def explain_repeats(
    outcome: Outcome, mine: NDArray[Any], theirs: NDArray[Any], names: tuple[str, str]
) -> Outcome | None:
    """Explain that one side repeats blocks of the other, like the heads of k and v, if it does."""
    if (longer := _longer(mine, theirs)) is None:
        return None
    dim, is_longer, short, long = longer
    times, rest = divmod(len(long), len(short))
    if rest or is_alike(long):
        return None
    for block in [size for size in range(len(short), 0, -1) if len(short) % size == 0]:
        once = short.reshape(-1, 1, block, *short.shape[1:])
        if (long.reshape(-1, times, block, *short.shape[1:]) == once).all():
            every = "every index" if block == 1 else f"every {block:,} indices"
            why = f"{names[is_longer]} has {every} of dim {dim} {times} times, one after the other"
            return outcome.became("other", why, RepeatedHeads(times))
    return None


def explain_shift(outcome: Outcome, mine: NDArray[Any], theirs: NDArray[Any], names: tuple[str, str]) -> Outcome | None:
    """Explain that one side lacks slices of a dim, and has those that follow at earlier or later places."""
    if mine.ndim != theirs.ndim or not mine.size or not theirs.size:
        return None
    (long, long_name), (short, short_name) = sorted(
        zip((mine, theirs), names, strict=True), key=lambda one: -one[0].size
    )
    for dim, first, second in _tables(long, short):
        places = _places_in(first, second)
        kept = np.flatnonzero(places >= 0)
        offsets = places[kept] - kept
        if len(kept) < max(FEWEST_KEPT, len(second) / 2) or not offsets.any() or (np.diff(places[kept]) <= 0).any():
            continue
        lost, new = np.setdiff1d(np.arange(len(first)), places[kept]), np.flatnonzero(places < 0)
        parts = [
            f"{side} lacks {'index' if len(odd) == 1 else 'indices'} {join_numbers(odd.tolist())} of {opposite}"
            for odd, side, opposite in ((lost, short_name, long_name), (new, long_name, short_name))
            if len(odd)
        ]
        why = f"of dim {dim}, {', '.join(parts)}; the others are in the same order, at other places"
        return outcome.became("other", why, LostSlices(dim, _num_shards(places, len(first))))
    return None


def explain_overwritten(
    outcome: Outcome, mine: NDArray[Any], theirs: NDArray[Any], names: tuple[str, str]
) -> Outcome | None:
    """Explain that parts of a dim were written over each other, so that one side has the last of them, and zeros."""
    if mine.shape != theirs.shape or mine.ndim < 2:
        return None
    for dim in range(mine.ndim):
        others = tuple(axis for axis in range(mine.ndim) if axis != dim)
        is_zero: NDArray[np.bool_] = np.asarray(~theirs.any(axis=others))
        size = len(is_zero) - int(is_zero.sum())
        is_cut = 0 < size < len(is_zero) and len(is_zero) % size == 0
        if not is_cut or is_zero[:size].any() or not np.all(mine.any(axis=others)):
            continue
        first, second = (np.moveaxis(side, dim, 0).reshape(len(is_zero), -1) for side in (mine, theirs))
        places = _places_in(first, second[:size])
        if np.array_equal(places, np.arange(len(is_zero) - size, len(is_zero))):
            taken, at, rest = (
                join_numbers(range(*span)) for span in ((places[0], places[0] + size), (0, size), (size, len(is_zero)))
            )
            why = f"of dim {dim}, {names[1]} has {names[0]}'s {taken} at {at}, and zeros at {rest}"
            return outcome.became("other", why, OverwrittenParts(dim))
    return None


def _tables(long: NDArray[Any], short: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """Yield both sides as tables of one row for each index of a dim, for each dim that alone may differ in length."""
    odd = [dim for dim in range(long.ndim) if long.shape[dim] != short.shape[dim]]
    for dim in odd or range(long.ndim) if len(odd) < 2 else ():
        starts = [side[tuple(slice(None) if at == dim else 0 for at in range(side.ndim))] for side in (long, short)]
        if np.isin(starts[1], starts[0]).sum() >= max(FEWEST_KEPT, short.shape[dim] / 2):
            first, second = (np.moveaxis(side, dim, 0).reshape(side.shape[dim], -1) for side in (long, short))
            yield dim, first, second


def _places_in(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.int64]:
    """Return where the first table has each row of the second; -1 for a row that it doesn't have once."""
    hashes, indices, counts = np.unique(line_hashes(first), return_index=True, return_counts=True)
    wanted = line_hashes(second)
    at = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
    return np.where((hashes[at] == wanted) & (counts[at] == 1), indices[at], -1)


def _num_shards(places: NDArray[np.int64], whole: int) -> int:
    """Return how many shards of its length a whole has if a side is one of these; else 0."""
    is_shard = len(places) < whole and whole % len(places) == 0 and places[0] % len(places) == 0
    return whole // len(places) if is_shard and np.array_equal(places, places[0] + np.arange(len(places))) else 0


def with_parts(outcomes: Outcomes) -> Outcomes:
    """Use the other tensors to decide whether a constant tensor is repeated or padded."""
    ends: set[_Lengths | None] = set()
    repeats: set[_Lengths | None] = set()
    for outcome, pair in outcomes:
        if isinstance(outcome.explanation, PaddedEnd | CutOffEnd):
            ends.add(_lengths(pair))
        elif isinstance(outcome.explanation, RepeatedHeads) and not _is_open(outcome.explanation):
            repeats.add(_ratio(_lengths(pair)))
    return [(_decided(outcome, _lengths(pair), ends, repeats), pair) for outcome, pair in outcomes]


def _is_open(cause: Cause | None) -> bool:
    """Whether a tensor that has this cause has equal parts and may have a longer end instead."""
    return isinstance(cause, KeptOneShard) or (isinstance(cause, RepeatedHeads) and cause.or_else is not None)


def _decided(
    outcome: Outcome, lengths: _Lengths | None, ends: Container[_Lengths | None], repeats: Container[_Lengths | None]
) -> Outcome:
    """Return what became of a tensor, given what the content of others shows.

    Args:
        lengths: Its length on both sides.
        ends: The lengths of those that are padded or cut off at their end.
        repeats: The smallest lengths of which one is as many times the other as of those that are repeated.
    """
    cause = outcome.explanation
    if cause is None or lengths is None or not _is_open(cause):
        return outcome
    if lengths in ends:
        return outcome.became("padded", outcome.why, cause.rivals[0])
    if (ratio := _ratio(lengths)) in repeats and ratio is not None:
        return outcome.became("other", f"{outcome.why}; others are repeated as often", RepeatedHeads(max(ratio)))
    return outcome


def _lengths(pair: Pair) -> _Lengths | None:
    """Return both lengths of the only dim that differs; None if that isn't one dim."""
    if pair.first is None or pair.second is None or len(pair.first.shape) != len(pair.second.shape):
        return None
    lengths = zip(pair.first.shape, pair.second.shape, strict=True)
    return the_only([(mine, theirs) for mine, theirs in lengths if mine != theirs])


def _ratio(lengths: _Lengths | None) -> _Lengths | None:
    """Return the smallest lengths with the same ratio."""
    if lengths is None or 0 in lengths:
        return None
    shared = math.gcd(*lengths)
    return lengths[0] // shared, lengths[1] // shared


def _longer(mine: NDArray[Any], theirs: NDArray[Any]) -> tuple[int, bool, NDArray[Any], NDArray[Any]] | None:
    """Return the only dim that differs, whether the second is longer, then short and long array.

    None if their shapes differ in another way.
    """
    if mine.ndim != theirs.ndim or not mine.size or not theirs.size:
        return None
    odd = [dim for dim in range(mine.ndim) if mine.shape[dim] != theirs.shape[dim]]
    if len(odd) != 1:
        return None
    is_longer = theirs.shape[odd[0]] > mine.shape[odd[0]]
    short, long = (np.moveaxis(one, odd[0], 0) for one in ((mine, theirs) if is_longer else (theirs, mine)))
    return odd[0], is_longer, short, long
