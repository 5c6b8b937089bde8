"""A matrix whose rows, or parts of rows, are the other's times a factor of their own.

A norm that is taken of a rank's own columns does this, and so do scales of quantization groups that are counted from
each rank's first one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.explain.checkpoints.conversion import FactorsOfBlocks
from shardviz.relate.casts import values_of
from shardviz.relate.tolerance import EPSILON, FLOATS, ROUNDINGS_OF_SCALE
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.records import Tensor

NARROWEST = 8
"""Elements of a block: of fewer, any numbers have a common factor within rounding too often."""

MOST = 1 << 24
"""Elements of a matrix that are looked at."""

AT_ONCE = 1 << 18
"""Elements whose numbers are made at a time."""

SAMPLE = 4
"""Rows that differ and are looked at before all are."""

MOST_TRIED = 4
"""Widths that are tried on all rows: those that fit the sample but not all rows may be many."""


@dataclass(frozen=True)
class Side:
    """One of the two matrices, with its lines as rows.

    Attributes:
        bits: Its elements' bits.
        dtype: Their dtype.
    """

    bits: NDArray[Any]
    dtype: str

    def numbers(self, rows: Any) -> Array:
        """Return the numbers of some rows."""
        bits = self.bits[rows]
        numbers: Array = values_of(np.ascontiguousarray(bits), self.dtype).reshape(bits.shape).astype(np.float64)
        return numbers


def scaled_in_blocks(outcome: Outcome, before: Tensor, after: Tensor, name: str) -> Outcome | None:
    """Say that parts of rows, or of columns, have factors of their own; None if they haven't.

    Args:
        outcome: The names of the two.
        before: What it was.
        after: What it is.
        name: What the second is called.
    """
    is_float = before.dtype in FLOATS and after.dtype in FLOATS
    if not is_float or before.shape != after.shape or len(before.shape) != 2:
        return None
    if min(before.shape) < 2 or math.prod(before.shape) > MOST:
        return None
    tolerance = ROUNDINGS_OF_SCALE * max(EPSILON[side.dtype] for side in (before, after))
    bits = before.bits, after.bits  # put together once
    is_whole = bits[0].shape == bits[1].shape == before.shape
    if not is_whole or (before.dtype == after.dtype and np.array_equal(*bits)):
        return None
    for dim, (line, others) in enumerate((("row", "columns"), ("column", "rows"))):
        sides = [Side(side.T if dim else side, of.dtype) for side, of in zip(bits, (before, after), strict=True)]
        is_other = (sides[0].bits != sides[1].bits).any(axis=1) | (before.dtype != after.dtype)
        sample = [side.numbers(np.flatnonzero(is_other)[:SAMPLE]) for side in sides]
        fitting = (width for width in _widths(before.shape[1 - dim]) if _factors(sample, width, tolerance) is not None)
        for width in islice(fitting, MOST_TRIED):
            factors = _factors_of_all(sides, width, tolerance)
            if factors is not None and _are_of_most_lines(factors, tolerance):
                return _scaled(outcome, name, line, others, width, factors, tolerance)
    return None


def _are_of_most_lines(factors: Array, tolerance: float) -> bool:
    """Whether factors differ, and most lines have another one than 1: a single line, or number, has other reasons."""
    is_scaled = (np.abs(factors - 1) > tolerance).any(axis=1)
    steps = np.diff(np.sort(factors.ravel())) > 2 * tolerance * np.abs(factors).max()
    return bool(steps.sum() > 1 and 2 * is_scaled.sum() > len(factors))


def _scaled(
    outcome: Outcome, name: str, line: str, others: str, width: int, factors: Array, tolerance: float
) -> Outcome:
    num_parts, is_right = factors.shape[1], (np.abs(factors - 1) <= tolerance).all(axis=0)
    parts = (
        f"in every {line}, each of {counted(num_parts, 'part')} of {width} {others}"
        if num_parts > 1
        else f"every {line}"
    )
    right = f" (1 in {counted(int(is_right.sum()), 'part')})" if is_right.any() else ""
    span = f"{factors.min():.4g} to {factors.max():.4g}{right}"
    cause = FactorsOfBlocks(line, others, is_part=num_parts > 1, is_some_right=bool(is_right.any()))
    return outcome.became("other", f"{parts} of {name} is the first's times a factor of its own, {span}", cause)


def _widths(size: int) -> Iterator[int]:
    """Yield the widths of blocks that divide a dim, the widest first."""
    yield from (size // count for count in range(1, size // NARROWEST + 1) if size % count == 0)


def _factors_of_all(sides: Sequence[Side], width: int, tolerance: float) -> Array | None:
    """Return the factor of each block of all rows, some rows at a time; None if some block has none."""
    num_rows, size = sides[0].bits.shape
    count, factors = max(AT_ONCE // size, 1), []
    for start in range(0, num_rows, count):
        some = _factors([side.numbers(slice(start, start + count)) for side in sides], width, tolerance)
        if some is None:
            return None
        factors.append(some)
    return np.concatenate(factors)


def _factors(pair: Sequence[Array], width: int, tolerance: float) -> Array | None:
    """Return the factor of each block of a row; None if some block has none: what is set to zero is not scaled."""
    first, second = (side.reshape(len(side), -1, width) for side in pair)
    squares = (first * first).sum(-1)
    with np.errstate(all="ignore"):
        factors: Array = (first * second).sum(-1) / np.where(squares == 0, 1.0, squares)
        expected = factors[..., None] * first
        is_near = np.abs(second - expected) <= tolerance * np.abs(expected)
    return factors if is_near.all() and factors[squares > 0].all() else None
