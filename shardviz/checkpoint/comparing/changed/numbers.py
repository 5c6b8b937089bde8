"""What was done to values and sizes, where the order is not it: rounded on the way, cut off, padded, repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.changed.words import Words
from shardviz.explain.conversion import (
    CutOffDigits,
    CutOffEnd,
    NarrowedOnTheWay,
    PaddedEnd,
    PaddedParts,
    RepeatedHeads,
)
from shardviz.relate.stored import is_cut_off, rounding_between
from shardviz.relate.values import is_alike

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.checkpoint.tensor import Tensor

    _Bits = tuple[NDArray[Any], str]

NARROW = ("bfloat16", "float16")
WIDE = ("float32", "float64")
CUT = {"float32": 16}
"""Bits that are cut off of a type to have the upper half of it, which is a bfloat16."""
MAX_RANKS = 1024
"""Ranks that may each have padded their own part."""


def rounded(one: Tensor, other: Tensor, names: tuple[str, str]) -> Words | None:
    """Say how values lost digits: through a narrower type, or cut off where torch rounds; None where they did not.

    Args:
        one: The first tensor.
        other: The second.
        names: What they are called.
    """
    mine, theirs = one.bits, other.bits
    if one.shape != other.shape or is_alike(mine):
        return None
    sides = (mine, one.dtype), (theirs, other.dtype)
    return _narrowed(*sides, names[1]) or _narrowed(*sides[::-1], names[0])


def _narrowed(own: _Bits, new: _Bits, name: str) -> Words | None:
    """Say how one side's values became those of the side that has a name."""
    (mine, dtype), (theirs, to) = own, new
    is_usual = dtype in WIDE and to in (dtype, *NARROW)
    if is_usual and (relation := rounding_between(mine, dtype, theirs, to, NARROW)) is not None:
        after, narrow = "" if dtype == to else f" to {to}", relation.dtype
        why = f"{name} has {dtype} values that were rounded to {narrow} on the way{after}"
        return Words(why, NarrowedOnTheWay(narrow, dtype, "" if dtype == to else to))
    if to == "bfloat16" and dtype in CUT and is_cut_off(mine, theirs, CUT[dtype]):
        return Words(f"{name} has {dtype} cut off to bfloat16, where torch rounds", CutOffDigits())
    return None


def padding(mine: NDArray[Any], theirs: NDArray[Any], names: tuple[str, str]) -> Words | None:
    """Say which side has more at the end of one dim, and is else equal; None where neither is that."""
    if (longer := _longer(mine, theirs)) is None:
        return None
    dim, is_longer, short, long = longer
    size, rest = len(short), long[len(short) :]
    if not np.array_equal(long[:size], short):
        return _padding_between(dim, short, long, names[is_longer])
    what = "all zero" if not rest.any() else "all alike" if is_alike(rest) else "not alike"
    why = f"equal in the first {size:,} indices of dim {dim}; {names[is_longer]} has {len(rest):,} more, {what}"
    if not is_longer:
        return Words(why, CutOffEnd())
    return Words(why, PaddedEnd(is_plain=what != "not alike"))


def _padding_between(dim: int, short: NDArray[Any], long: NDArray[Any], name: str) -> Words | None:
    """Say that one side was padded part by part: the other's parts, divided as torch divides them, with more behind."""
    size = len(long)
    for ranks in [count for count in range(2, min(size, MAX_RANKS) + 1) if size % count == 0]:
        room, part = size // ranks, -(-len(short) // ranks)
        starts = range(0, len(short), part)
        parts = ((short[at : at + part], long[at // part * room :]) for at in starts)
        if part < room and all(np.array_equal(own, there[: len(own)]) for own, there in parts):
            more = "1 more index" if room - part == 1 else f"{room - part:,} more indices"
            why = f"{name} has {more} of dim {dim} behind every {part:,}"
            return Words(why, PaddedParts(ranks))
    return None


def repeated(mine: NDArray[Any], theirs: NDArray[Any], names: tuple[str, str]) -> Words | None:
    """Say that one side has blocks of the other several times, as heads of k and v are; None where it has not."""
    if (longer := _longer(mine, theirs)) is None:
        return None
    dim, is_longer, short, long = longer
    times, rest = divmod(len(long), len(short))
    if rest or is_alike(long):
        return None
    for block in [size for size in range(len(short), 0, -1) if len(short) % size == 0]:
        once = short.reshape(-1, 1, block, *short.shape[1:])
        if (long.reshape(-1, times, block, *short.shape[1:]) == once).all():
            why = f"{names[is_longer]} has every {block:,} indices of dim {dim} {times} times, one after the other"
            return Words(why, RepeatedHeads(times))
    return None


def _longer(mine: NDArray[Any], theirs: NDArray[Any]) -> tuple[int, bool, NDArray[Any], NDArray[Any]] | None:
    """Return the only dim in which two arrays differ, whether the second is longer, and both along it, shorter first.

    None where their shapes differ in another way.
    """
    if mine.ndim != theirs.ndim or not mine.size or not theirs.size:
        return None
    odd = [dim for dim in range(mine.ndim) if mine.shape[dim] != theirs.shape[dim]]
    if len(odd) != 1:
        return None
    is_longer = theirs.shape[odd[0]] > mine.shape[odd[0]]
    short, long = (np.moveaxis(one, odd[0], 0) for one in ((mine, theirs) if is_longer else (theirs, mine)))
    return odd[0], is_longer, short, long
