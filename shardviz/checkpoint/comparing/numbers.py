"""What was done to values and sizes, where the order is not it: rounded on the way, cut off, padded, repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.casts import cast
from shardviz.layout.region import index_of
from shardviz.reference.lookup import is_alike

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.checkpoint.tensor import Tensor

NARROW = ("bfloat16", "float16")
WIDE = ("float32", "float64")
CUT = {"float32": 16}
"""Bits that are cut off of a type to have the upper half of it, which is a bfloat16."""


def rounded(one: Tensor, other: Tensor) -> tuple[str, str, str]:
    """Say how values lost digits: through a narrower type, or cut off where torch rounds; empty where they did not.

    Returns:
        The words, the cause and the fix.
    """
    mine, theirs = one.bits, other.bits
    if one.shape != other.shape or is_alike(mine):
        return "", "", ""
    for which, (own, dtype), (new, to) in (
        ("second", (mine, one.dtype), (theirs, other.dtype)),
        ("first", (theirs, other.dtype), (mine, one.dtype)),
    ):
        if dtype == to and dtype in WIDE:
            for narrow in NARROW:
                if _is_through(own, new, dtype, narrow):
                    why = f"the {which} has {dtype} values that were rounded to {narrow} on the way"
                    return why, f"They went through {narrow}.", f"keep {dtype} from load to save"
        if to == "bfloat16" and dtype in CUT and np.array_equal((own >> CUT[dtype]).astype(new.dtype), new):
            why = f"the {which} has {dtype} cut off to bfloat16, where torch rounds"
            return why, "The upper half of each value was taken.", "cast with Tensor.to(torch.bfloat16), which rounds"
    return "", "", ""


def _is_through(own: NDArray[Any], new: NDArray[Any], dtype: str, narrow: str) -> bool:
    there = cast(own, dtype, narrow)
    back = None if there is None else cast(there, narrow, dtype)
    return back is not None and np.array_equal(back, new)


def padding(mine: NDArray[Any], theirs: NDArray[Any]) -> str:
    """Say which side has more at the end of one dim, and is else equal; empty where neither is that."""
    dim = _odd_dim(mine, theirs)
    if dim is None:
        return ""
    is_longer = theirs.shape[dim] > mine.shape[dim]
    short, long = (np.moveaxis(one, dim, 0) for one in ((mine, theirs) if is_longer else (theirs, mine)))
    size, rest = len(short), long[len(short) :]
    if not np.array_equal(long[:size], short):
        return ""
    what = "all zero" if not rest.any() else "all alike" if is_alike(rest) else "not alike"
    which = "second" if is_longer else "first"
    return f"equal in the first {size:,} indices of dim {dim}; the {which} has {len(rest):,} more, {what}"


def why_padded(mine: NDArray[Any], theirs: NDArray[Any]) -> tuple[str, str]:
    """Return the cause and the fix."""
    if theirs.size > mine.size:
        cause = "It was padded, as a vocabulary is that has to shard evenly."
        return cause, "cut the padding off in the conversion, or load it into a model of that size"
    return "The end was cut off.", "keep it, unless it is padding"


def repeated(mine: NDArray[Any], theirs: NDArray[Any]) -> str:
    """Say that one side has blocks of the other several times, as heads of k and v are; empty where it has not."""
    dim = _odd_dim(mine, theirs)
    if dim is None:
        return ""
    is_longer = theirs.shape[dim] > mine.shape[dim]
    short, long = (np.moveaxis(one, dim, 0) for one in ((mine, theirs) if is_longer else (theirs, mine)))
    times, rest = divmod(len(long), len(short))
    for block in [] if rest else [size for size in range(len(short), 0, -1) if len(short) % size == 0]:
        blocks = short.reshape(-1, 1, block, *short.shape[1:])
        if (long.reshape(-1, times, block, *short.shape[1:]) == blocks).all():
            which = "second" if is_longer else "first"
            return f"the {which} has every {block:,} indices of dim {dim} {times} times, one after the other"
    return ""


def _odd_dim(mine: NDArray[Any], theirs: NDArray[Any]) -> int | None:
    """Return the only dim in which two shapes differ."""
    if mine.ndim != theirs.ndim or not mine.size or not theirs.size:
        return None
    odd = [dim for dim in range(mine.ndim) if mine.shape[dim] != theirs.shape[dim]]
    return odd[0] if len(odd) == 1 else None


def counted_differences(one: Tensor, other: Tensor, mine: NDArray[Any], theirs: NDArray[Any]) -> str:
    """Say how many values differ, and where the first one is."""
    if one.shape != other.shape:
        more = repeated(mine, theirs)
        return f"{one.dtype}{list(one.shape)} became {other.dtype}{list(other.shape)}" + (f": {more}" if more else "")
    different = mine != theirs
    at = int(np.argmax(different))
    where = index_of(at, one.shape)
    alike = "; all values of the second are alike" if is_alike(theirs) and theirs.size > 1 else ""
    return f"{int(different.sum()):,} of {mine.size:,} elements differ, the first at {where}{alike}"
