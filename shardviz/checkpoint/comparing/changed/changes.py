"""What became of a tensor that is not equal: another order, padding, a rounding, a factor, or other values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.agreement import narrower
from shardviz.checkpoint.comparing.changed.numbers import padding, repeated, rounded, shifted
from shardviz.checkpoint.comparing.changed.orders import name_change
from shardviz.checkpoint.comparing.outcome import Change
from shardviz.checkpoint.records import Saved
from shardviz.layout.region import box_of, index_of
from shardviz.relate.casts import cast
from shardviz.relate.tolerance import FLOATS
from shardviz.relate.values import blocks, is_alike, part_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.checkpoint.tensor import Tensor
    from shardviz.layout.region import Region

SIDES = ("the first", "the second")

EXPONENTS = {"float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "float16": 0x7C00, "bfloat16": 0x7F80}
"""The bits of a value that are its exponent."""


def change_of(before: Tensor, after: Tensor, names: tuple[str, str] = SIDES) -> Change:
    """Say what became of a tensor.

    Args:
        before: What it was.
        after: What it is: not that, in a type to which values are known to be rounded.
        names: What the two are called.

    Raises:
        DumpError: One of them cannot be read.
    """
    narrow = narrower(before.dtype, after.dtype)
    mine, theirs = (cast(side.bits, side.dtype, narrow) for side in (before, after))
    assert mine is not None, "can_cast says so"
    assert theirs is not None, "can_cast says so"
    types = "" if before.dtype == after.dtype else f"; {before.dtype} and {after.dtype}"
    cuts = tuple(side for side in (after, before) if isinstance(side, Saved))
    if change := name_change(mine, theirs, cuts):
        return Change("permuted", f"{change}{types}")
    if changed := repeated(mine, theirs, names):
        shapes = f"{before.dtype}{list(before.shape)} became {after.dtype}{list(after.shape)}"
        return replace(changed, why=f"{shapes}: {changed.why}")
    if changed := padding(mine, theirs, names):
        return replace(changed, why=f"{changed.why}{types}")
    if changed := rounded(before, after, names):
        return changed
    if changed := shifted(mine, theirs, narrow, names):
        return replace(changed, why=f"{changed.why}{types}")
    return Change("other", counted_differences(before, after, mine, theirs, names))


def counted_differences(
    before: Tensor, after: Tensor, mine: NDArray[Any], theirs: NDArray[Any], names: tuple[str, str]
) -> str:
    """Say how many values differ, and which; `mine` and `theirs` are the bits of both in the narrower type."""
    if before.shape != after.shape:
        return f"{before.dtype}{list(before.shape)} became {after.dtype}{list(after.shape)}"
    if mine.size == 1 and (old := _first(before)) != (new := _first(after)):
        return f"{old} became {new}"
    different = mine != theirs
    where = index_of(int(np.argmax(different)), before.shape)
    count = int(different.sum())
    words = f"{count:,} of {mine.size:,} elements differ, the first at {where}"
    box = box_of(different)
    if box is not None:
        words += f": all of {box}"
    for name, side in zip(names, (before, after), strict=True):
        if mine.size > 1 and (number := _only(side, box)):
            words += f"; all values of {name} {'there ' if box is not None else ''}are {number}"
        elif broken := _not_finite(side):
            words += f"; {broken:,} values of {name} are nan or infinite"
    return words


def _only(side: Tensor, box: Region | None) -> str:
    """Return the number that all values of a tensor, or of a part of it, are; empty if they are not alike."""
    bits = side.bits if box is None else part_of(side.bits, box)
    if side.dtype in FLOATS and not any((part << 1).any() for part in blocks(bits)):
        return "0"  # and some of them -0
    return _text(bits, side.dtype) if is_alike(bits) else ""


def _first(side: Tensor) -> str:
    return _text(side.bits, side.dtype)


def _text(bits: NDArray[Any], dtype: str) -> str:
    """Return the first number of some."""
    found = cast(np.array(bits).reshape(-1)[:1], dtype, "float64")
    return f"{found.view(np.float64)[0]:g}" if found is not None else "alike"


def _not_finite(side: Tensor) -> int:
    """Return how many values are nan or infinite: all bits of their exponents are set."""
    mask = EXPONENTS.get(side.dtype, 0)
    return sum(int(((part & mask) == mask).sum()) for part in blocks(side.bits)) if mask else 0
