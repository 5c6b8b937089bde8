"""Changes of all values of a stored tensor: scaled, shifted, rounded, made from others.

Tensors are given as bits, as files have them, and read in blocks: a file that is mapped into memory is never loaded
whole. What differs is mostly seen in the first block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.casts import through, values_of
from shardviz.relate.factors import factor_at_largest
from shardviz.relate.relations import Offset, Rounded, Scaled
from shardviz.relate.tolerance import EPSILON, FLOATS, SAFETY
from shardviz.relate.values import SAMPLES, blocks, is_alike, sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bits = NDArray[Any]
    Values = NDArray[np.float64]


def line_between(before: Bits, after: Bits, dtype: str, roundings: float = 1.0) -> Scaled | Offset | None:
    """Return the number that multiplies all values of a tensor, or is added to them.

    Args:
        before: The bits of the tensor.
        after: The bits that it became.
        dtype: The dtype of both.
        roundings: How many roundings a value may be off, relative to the largest of the numbers that take part.

    Returns:
        The relation; None if there is none, if either is one number everywhere, or if the number is as near to doing
        nothing as `SAFETY` roundings.

    Example:
        >>> values = np.arange(1.0, 9.0, dtype=np.float32)
        >>> line_between(values.view(np.uint32), (values * 3).view(np.uint32), "float32")
        Scaled(factor=3.0)
    """
    if before.shape != after.shape or dtype not in FLOATS or is_alike(before) or is_alike(after):
        return None
    old, new = (values_of(sampled(bits), dtype) for bits in (before, after))
    if not len(old) or not np.isfinite([old, new]).all():
        return None
    epsilon = EPSILON[dtype]
    room = SAFETY * epsilon * float(np.abs(old).max())
    if np.ptp(old) <= room:
        return None
    factor, number = factor_at_largest(new, old), float(np.median(new - old))
    is_factor = factor != 0 and abs(factor - 1) > SAFETY * epsilon
    if is_factor and is_made(after, [before], dtype, lambda old: old * factor, roundings * epsilon):
        return Scaled(factor)
    is_number = abs(number) > room and is_made(after, [before], dtype, lambda old: old + number, roundings * epsilon)
    return Offset(number) if is_number else None


def rounding_between(before: Bits, dtype: str, after: Bits, to: str, narrower: Sequence[str]) -> Rounded | None:
    """Return the narrower type through which values went on their way from one type to another.

    What became a single number, such as zeros, was filled: a rounding of small values may do the same by chance.

    Args:
        before: The bits of the tensor.
        dtype: Its dtype.
        after: The bits that it became.
        to: Their dtype.
        narrower: The types to try.
    """
    if before.shape != after.shape or (
        after.size > 1 and (is_alike(after) or not any((part << 1).any() for part in blocks(after)))
    ):
        return None
    few = (sampled(before), sampled(after)) if before.size > SAMPLES else (before, after)
    for narrow in (narrow for narrow in narrower if narrow != to and _is_cast_by(*few, dtype, narrow, to)):
        if all(_is_cast_by(*pair, dtype, narrow, to) for pair in _blocks_of_both(before, after)):
            return Rounded(narrow)
    return None


def _blocks_of_both(before: Bits, after: Bits) -> zip[tuple[Bits, Bits]]:
    return zip(blocks(before), blocks(after), strict=True)


def _is_cast_by(before: Bits, after: Bits, dtype: str, narrow: str, to: str) -> bool:
    there = through(before, dtype, narrow, to)
    return there is not None and np.array_equal(there, after)


def is_cut_off(before: Bits, after: Bits, by: int) -> bool:
    """Whether values are the upper bits of others, cut off instead of rounded.

    Args:
        before: The bits of the wider type.
        after: The bits that they became.
        by: How many bits were cut off.
    """
    pairs = _blocks_of_both(before, after)
    return all(np.array_equal((wide >> by).astype(narrow.dtype), narrow) for wide, narrow in pairs)


def is_made(
    held: Bits,
    sources: Sequence[Bits],
    dtype: str,
    function: Callable[..., Values],
    rounding: float,
    slack: float = 0.0,
) -> bool:
    """Whether all values of a tensor are made of those of others, but for roundings.

    Args:
        held: The bits of the tensor.
        sources: Those of the others, of the same shape.
        dtype: The dtype of all.
        function: Returns what is due, given the sources' values.
        rounding: How far a value may be off, relative to the largest of the values that take part.
        slack: How far it may be off besides that, relative to the difference of the last source and the first.
    """
    for there, *parts in zip(blocks(held), *map(blocks, sources), strict=True):
        values, source_values = values_of(there, dtype), [values_of(part, dtype) for part in parts]
        with np.errstate(all="ignore"):
            expected = function(*source_values)
            size = np.abs(values)
            for tensor in (expected, *source_values):
                size = np.maximum(size, np.abs(tensor))
            room = rounding * size + (slack * np.abs(source_values[-1] - source_values[0]) if slack else 0.0)
            if not (np.abs(values - expected) <= room).all():
                return False
    return True
