"""How a tensor changed: its order, padding, a rounding, a factor for all or for each block, or different values.

A norm that is taken of a rank's own columns scales blocks, and so do scales of quantization groups that are counted
from each rank's first one. Zero points of groups move blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.equality import narrower
from shardviz.checkpoint.comparing.one_tensor.lengths import (
    explain_overwritten,
    explain_padding,
    explain_repeats,
    explain_shift,
)
from shardviz.checkpoint.comparing.one_tensor.orders import cause_of_order, is_long_line, name_change
from shardviz.checkpoint.comparing.outcome import Distance
from shardviz.checkpoint.records import StoredTensor
from shardviz.explain.checkpoints.conversion import (
    CutOffDigits,
    ForgottenFactor,
    ForgottenOffset,
    FunctionOfOther,
    NarrowedOnTheWay,
)
from shardviz.explain.checkpoints.quantization import FactorsOfBlocks, OffsetsOfBlocks
from shardviz.layout.dtypes import HALVES
from shardviz.layout.region import box_of, index_of
from shardviz.relate.casts import (
    cast,
    function_between,
    is_cut_off,
    line_between,
    numbers_of,
    rounding_between,
    values_of,
)
from shardviz.relate.relations import Scaled
from shardviz.relate.tolerance import EPSILON, FLOATS, ROUNDINGS_OF_SCALE, WHOLE_FACTOR
from shardviz.relate.values import blocks, is_alike, part_of
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.records import Tensor
    from shardviz.layout.region import Region

    Array = NDArray[np.float64]
    NumbersIn = Callable[[Sequence[Array], int, float], Array | None]

NAMES = ("the first", "the second")

WIDE = ("float32", "float64")

MORE, LESS = ("more", "subtract"), ("less", "add")

CUT = {"float32": 16}
"""Bits that are cut off of a type to have the upper half of it, which is a bfloat16."""

FEW = 64
"""Values that are too few for a correlation."""

FLAT = 1e-9
"""The part of the sum of squares that a tensor of one number has around its mean, by rounding alone."""

MOST_SHOWN = 4
"""Numbers of either side that are shown."""

MOST_DIGITS = 17
"""Digits that tell any two numbers of 64 bits apart."""

LEAST_LOST, SHARE_LOST, NEARLY_ALL = 8, 0.1, 0.9
"""A cast to float16 is not asked about fewer values that it makes zero, or a smaller share; so many are nearly all."""

NARROWEST = 8
"""Elements of a block: of fewer, any numbers have a common factor within rounding too often."""

LEAST_OFFSET = 16
"""An offset is so many times larger than what rounding may do to a number."""

MOST_IN_BLOCKS = 1 << 24
"""Elements of a matrix that are looked at."""

AT_ONCE = 1 << 18
"""Elements whose numbers are made at a time."""

SAMPLE_ROWS = 4
"""Rows that differ and are looked at before all are."""

MOST_TRIED = 4
"""Widths that are tried on all rows: those that fit the sample but not all rows may be many."""


def change_of(outcome: Outcome, before: Tensor, after: Tensor, names: tuple[str, str] = NAMES) -> Outcome:
    """Say what became of a tensor.

    Args:
        after: What it is: not that, in a type to which values are known to be rounded.
        names: What the two are called.

    Raises:
        DumpError: One of them cannot be read.
    """
    narrow = narrower(before.dtype, after.dtype)
    before_bits, after_bits = (cast(side.bits, side.dtype, narrow) for side in (before, after))
    assert before_bits is not None, "can_cast says so"
    assert after_bits is not None, "can_cast says so"
    types = "" if before.dtype == after.dtype else f"; {before.dtype} and {after.dtype}"
    cuts = tuple(side for side in (after, before) if isinstance(side, StoredTensor))
    if order := name_change(before_bits, after_bits, cuts):
        return outcome.became("permuted", f"{order}{types}", cause_of_order(before_bits, after_bits))
    if changed := explain_repeats(outcome, before_bits, after_bits, names):
        shapes = f"{before.dtype}{list(before.shape)} became {after.dtype}{list(after.shape)}"
        return replace(changed, why=f"{shapes}: {changed.why}")
    for explain in (explain_padding, explain_overwritten, explain_shift):
        is_slow = explain is explain_shift and is_long_line(before_bits)
        if not is_slow and (changed := explain(outcome, before_bits, after_bits, names)):
            return replace(changed, why=f"{changed.why}{types}")
    if not is_alike(before.bits) and (changed := values_changed(outcome, before, after, names)):
        return changed
    why = counted_differences(before, after, before_bits, after_bits, names)
    changed = scaled_in_blocks(outcome, before, after, names[1]) or outcome.became("other", why)
    return replace(changed, distance=distance_between(before, after))


def distance_between(before: Tensor, after: Tensor) -> Distance | None:
    """Return how far two tensors of one shape are apart; None for few values, or if one is not finite.

    Both are read block by block.
    """
    is_float = before.dtype in FLOATS and after.dtype in FLOATS
    if before.shape != after.shape or not is_float or math.prod(before.shape) < FEW:
        return None
    sums = np.zeros(5)
    squares, num_equal = 0.0, 0
    for parts in zip(blocks(before.bits), blocks(after.bits), strict=True):
        old, new = (values_of(part, side.dtype).ravel() for part, side in zip(parts, (before, after), strict=True))
        with np.errstate(all="ignore"):
            sums += [old.sum(), new.sum(), old @ old, new @ new, old @ new]
            squares += float((new - old) @ (new - old))
            num_equal += int(np.count_nonzero((new == old) & (new != 0)))
    if not np.isfinite([*sums, squares]).all() or sums[2] == 0:
        return None
    count = math.prod(before.shape)
    spread = [sums[2] - sums[0] ** 2 / count, sums[3] - sums[1] ** 2 / count]
    is_flat = any(one <= FLAT * whole for one, whole in zip(spread, sums[2:4], strict=True))
    both = sums[4] - sums[0] * sums[1] / count
    correlation = None if is_flat else float(both / math.sqrt(spread[0] * spread[1]))
    return Distance(math.sqrt(squares / sums[2]), correlation, num_equal / count)


def counted_differences(
    before: Tensor, after: Tensor, before_bits: NDArray[Any], after_bits: NDArray[Any], names: tuple[str, str]
) -> str:
    """Say how many values differ, and which; both bits are in the narrower of the two dtypes."""
    if before.shape != after.shape:
        return f"{before.dtype}{list(before.shape)} became {after.dtype}{list(after.shape)}"
    if before_bits.size == 1:
        old, new = (_number_text(side.bits, side.dtype) for side in (before, after))
        if old != new:
            return f"{old} became {new}"
    different = before_bits != after_bits
    where = index_of(int(np.argmax(different)), before.shape)
    count = int(different.sum())
    words = f"{count:,} of {before_bits.size:,} elements differ, the first at {where}"
    box = box_of(different)
    if box is not None:
        words += f": all of {box}"
    for name, side in zip(names, (before, after), strict=True):
        if before_bits.size > 1 and (number := _constant_text(side, box)):
            words += f"; all values of {name} {'there ' if box is not None else ''}are {number}"
        elif side.dtype in FLOATS and (broken := _not_finite(side)):
            words += f"; {counted(broken, 'value')} of {name} {'is' if broken == 1 else 'are'} nan or infinite"
    return words


def _constant_text(side: Tensor, box: Region | None) -> str:
    """Return the number that fills a tensor, or a box of it; empty if values vary."""
    bits = side.bits if box is None else part_of(side.bits, box)
    if side.dtype in FLOATS and not any((part << 1).any() for part in blocks(bits)):
        return "0"  # and some of them -0
    return _number_text(bits, side.dtype) if is_alike(bits) else ""


def _number_text(bits: NDArray[Any], dtype: str) -> str:
    """Return the first number of some."""
    number = cast(np.array(bits).reshape(-1)[:1], dtype, "float64")
    return f"{number.view(np.float64)[0]:g}" if number is not None else "alike"


def _not_finite(side: Tensor) -> int:
    return sum(int((~np.isfinite(numbers_of(part, side.dtype))).sum()) for part in blocks(side.bits))


def values_changed(
    outcome: Outcome,
    before: Tensor,
    after: Tensor,
    names: tuple[str, str] = NAMES,
    through: Sequence[str] | None = None,
) -> Outcome | None:
    """Say that all values were rounded, scaled or shifted by a number; None if they weren't.

    Args:
        names: What the two are called.
        through: The types that values may have been rounded to on their way; None for those of usual casts.
    """
    if before.shape != after.shape:
        return None
    for old, new, name in ((before, after, names[1]), (after, before, names[0])):
        types = through_types(old.dtype, new.dtype) if through is None else through
        if changed := _explain_narrowing(outcome, old, new, name, types):
            return changed
    narrow = narrower(before.dtype, after.dtype)
    before_bits, after_bits = (cast(side.bits, side.dtype, narrow) for side in (before, after))
    relation = None if before_bits is None or after_bits is None else line_between(before_bits, after_bits, narrow)
    if relation is None:
        return _made_by_function(outcome, before, after, names)
    dtypes = "" if before.dtype == after.dtype else f"; {before.dtype} and {after.dtype}"
    if isinstance(relation, Scaled):
        why = f"every value of {names[1]} is {factor_text(relation.factor)} times that of {names[0]}{dtypes}"
        return outcome.became("other", why, ForgottenFactor(factor_text(1 / relation.factor), relation.factor))
    size, (how, undo) = number_text(abs(relation.number)), MORE if relation.number > 0 else LESS
    why = f"every value of {names[1]} is {size} {how} than in {names[0]}{dtypes}"
    return outcome.became("other", why, ForgottenOffset(undo, size))


def _made_by_function(outcome: Outcome, before: Tensor, after: Tensor, names: tuple[str, str]) -> Outcome | None:
    """Say that a function of each value makes that of the other; None if none does."""
    function = function_between(before.bits, before.dtype, after.bits, after.dtype)
    if function is None:
        return None
    shown = (values_of(side.bits.ravel()[:MOST_SHOWN], side.dtype).tolist() for side in (before, after))
    first, second = (listed((f"{number:#.4g}" for number in numbers), MOST_SHOWN) for numbers in shown)
    dtypes = "" if before.dtype == after.dtype else f"; {before.dtype} and {after.dtype}"
    why = f"every value of {names[1]} is {function.text}, x that of {names[0]}: {first}, ... became {second}{dtypes}"
    return outcome.became("other", why, FunctionOfOther(function.text, function.inverse))


def _explain_narrowing(
    outcome: Outcome, before: Tensor, after: Tensor, name: str, through: Sequence[str]
) -> Outcome | None:
    """Say how values were narrowed on the way: rounded through a dtype, or cut off."""
    dtype, to = before.dtype, after.dtype
    if through and (relation := rounding_between(before.bits, dtype, after.bits, to, through)) is not None:
        end, narrow = "" if dtype == to else f" to {to}", relation.dtype
        why = f"{name} has {dtype} values that were rounded to {narrow} on the way{end}"
        return outcome.became("cast", why, NarrowedOnTheWay(narrow, dtype, "" if dtype == to else to))
    if to == "bfloat16" and dtype in CUT and is_cut_off(before.bits, after.bits, CUT[dtype]):
        why = f"{name} has {dtype} cut off to bfloat16, where torch rounds"
        return outcome.became("cast", why, CutOffDigits())
    return None


def through_types(dtype: str, to: str) -> Sequence[str]:
    """Return the narrower types through which values may have been cast between two types."""
    return HALVES if dtype in WIDE and to in (dtype, *HALVES) else ()


def overflown(wide: NDArray[Any], dtype: str, to: str) -> str:
    """Say how many values a cast made infinite; empty if it made none."""
    count = 0
    for block in blocks(wide):
        narrow = cast(block, dtype, to)
        if narrow is not None:
            count += int((np.isinf(values_of(narrow, to)) & np.isfinite(values_of(block, dtype))).sum())
    return f"{count:,} of {wide.size:,} values are too large for {to} and became infinite" if count else ""


def lost_to_zero(wide: NDArray[Any], dtype: str, to: str) -> str:
    """Say how many of the values that are not zero a cast made zero; empty if it made hardly any so."""
    lost = count = 0
    for block in blocks(wide):
        narrow = cast(block, dtype, to)
        if narrow is not None:
            is_there = values_of(block, dtype) != 0
            count += int(is_there.sum())
            lost += int((is_there & (values_of(narrow, to) == 0)).sum())
    if lost < max(LEAST_LOST, SHARE_LOST * count):
        return ""
    much = "all" if lost == count else "nearly all" if lost > NEARLY_ALL * count else "many"
    return f"{much} of the values that are not zero in {dtype} are zero in {to}"


def factor_text(factor: float) -> str:
    """Return a factor in few digits; in as many as it takes to tell it from 1.

    Example:
        >>> factor_text(0.990099), factor_text(0.99996), factor_text(2.003), factor_text(1.0)
        ('0.9901', '0.99996', '2', '1')
    """
    if round(factor) ** 2 != 1:
        return number_text(factor)
    texts = [f"{factor:.{digits}g}" for digits in range(4, MOST_DIGITS + 1)]
    return next((text for text in texts if float(text) ** 2 != 1), texts[0])


def number_text(number: float) -> str:
    """Return a number in few digits; as a whole number if it is nearly one."""
    near = round(number)
    is_whole = near and math.isclose(number, near, rel_tol=WHOLE_FACTOR) and abs(number - near) < WHOLE_FACTOR
    return f"{near:,}" if is_whole else f"{number:.4g}"


@dataclass(frozen=True)
class Side:
    """One of the two matrices, with its lines as rows."""

    bits: NDArray[Any]
    dtype: str

    def numbers(self, rows: Any) -> Array:
        """Return the numbers of some rows."""
        bits = self.bits[rows]
        numbers: Array = values_of(np.ascontiguousarray(bits), self.dtype).reshape(bits.shape).astype(np.float64)
        return numbers


def scaled_in_blocks(outcome: Outcome, before: Tensor, after: Tensor, name: str) -> Outcome | None:
    """Say that parts of rows, or of columns, have factors or offsets of their own; None if they haven't.

    Args:
        name: What the second is called.
    """
    is_float = before.dtype in FLOATS and after.dtype in FLOATS
    if not is_float or before.shape != after.shape or len(before.shape) != 2:
        return None
    if min(before.shape) < 2 or math.prod(before.shape) > MOST_IN_BLOCKS:
        return None
    tolerance = ROUNDINGS_OF_SCALE * max(EPSILON[side.dtype] for side in (before, after))
    bits = before.bits, after.bits  # put together once
    is_whole = bits[0].shape == bits[1].shape == before.shape
    if not is_whole or (before.dtype == after.dtype and np.array_equal(*bits)):
        return None
    for numbers_in, neutral, outcome_of in ((_factors, 1.0, _scaled), (_offsets, 0.0, _moved)):
        for dim, (line, others) in enumerate((("row", "columns"), ("column", "rows"))):
            sides = [Side(side.T if dim else side, of.dtype) for side, of in zip(bits, (before, after), strict=True)]
            is_other = (sides[0].bits != sides[1].bits).any(axis=1) | (before.dtype != after.dtype)
            sample = [side.numbers(np.flatnonzero(is_other)[:SAMPLE_ROWS]) for side in sides]
            length, size = before.shape[1 - dim], max(float(np.abs(side).max()) for side in sample)
            widths = [length // count for count in range(1, length // NARROWEST + 1) if length % count == 0]
            fitting = (width for width in widths if numbers_in(sample, width, tolerance) is not None)
            for width in islice(fitting, MOST_TRIED):
                numbers = _numbers_of_all(numbers_in, sides, width, tolerance)
                if numbers is None:
                    continue
                largest = size if numbers_in is _offsets else float(np.abs(numbers).max())
                if _are_of_most_lines(numbers, neutral, tolerance * largest):
                    return outcome_of(outcome, name, Blocks(line, others, width, numbers, tolerance))
    return None


def _are_of_most_lines(numbers: Array, neutral: float, noise: float) -> bool:
    """Whether numbers differ, and most lines have one that changes them: a single line, or number, has other reasons.

    Args:
        neutral: The number that changes nothing: a factor of 1, or an offset of 0.
        noise: How far rounding may take a number.
    """
    is_changed = (np.abs(numbers - neutral) > noise).any(axis=1)
    steps = np.diff(np.sort(numbers.ravel())) > 2 * noise
    return bool(steps.sum() > 1 and 2 * is_changed.sum() > len(numbers))


@dataclass(frozen=True)
class Blocks:
    """Parts of all lines of a matrix, with a number for each.

    Attributes:
        line: What a line is: row or column.
        others: What a part of it is made of: columns or rows.
        width: How many of them.
        numbers: A row of numbers for each line.
        tolerance: How far they may be off, relative to the largest.
    """

    line: str
    others: str
    width: int
    numbers: Array
    tolerance: float

    @property
    def is_part(self) -> bool:
        """Whether a line has several parts."""
        return bool(self.numbers.shape[1] > 1)

    @property
    def name(self) -> str:
        """What has a number of its own, as the beginning of a sentence."""
        parts = f"each of {counted(self.numbers.shape[1], 'part')} of {self.width} {self.others}"
        return f"in every {self.line}, {parts}" if self.is_part else f"every {self.line}"


def _scaled(outcome: Outcome, name: str, parts: Blocks) -> Outcome:
    factors, is_right = parts.numbers, (np.abs(parts.numbers - 1) <= parts.tolerance).all(axis=0)
    right = f" (1 in {counted(int(is_right.sum()), 'part')})" if is_right.any() else ""
    span = f"{factors.min():.4g} to {factors.max():.4g}{right}"
    cause = FactorsOfBlocks(parts.line, parts.others, is_part=parts.is_part, is_some_right=bool(is_right.any()))
    return outcome.became("other", f"{parts.name} of {name} is the first's times a factor of its own, {span}", cause)


def _moved(outcome: Outcome, name: str, parts: Blocks) -> Outcome:
    span = f"{parts.numbers.min():.4g} to {parts.numbers.max():.4g}"
    cause = OffsetsOfBlocks(parts.line, parts.others, is_part=parts.is_part)
    return outcome.became("other", f"{parts.name} of {name} is the first's plus a number of its own, {span}", cause)


def _numbers_of_all(numbers_in: NumbersIn, sides: Sequence[Side], width: int, tolerance: float) -> Array | None:
    """Return the number of each block of all rows, some rows at a time; None if some block has none."""
    num_rows, size = sides[0].bits.shape
    count, numbers = max(AT_ONCE // size, 1), []
    for start in range(0, num_rows, count):
        some = numbers_in([side.numbers(slice(start, start + count)) for side in sides], width, tolerance)
        if some is None:
            return None
        numbers.append(some)
    return np.concatenate(numbers)


def _offsets(pair: Sequence[Array], width: int, tolerance: float) -> Array | None:
    """Return what is added to each block of a row; None if it is not one number in some block."""
    first, second = (side.reshape(len(side), -1, width) for side in pair)
    sizes = np.maximum(np.abs(first), np.abs(second)).max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        offsets: Array = (second - first).mean(-1)
        is_near = np.abs(second - first - offsets[..., None]) <= tolerance * sizes
        is_clear = (offsets == 0) | (np.abs(offsets) > LEAST_OFFSET * tolerance * sizes[..., 0])
    return offsets if is_near.all() and is_clear.all() else None


def _factors(pair: Sequence[Array], width: int, tolerance: float) -> Array | None:
    """Return the factor of each block of a row; None if some block has none: what is set to zero is not scaled."""
    first, second = (side.reshape(len(side), -1, width) for side in pair)
    squares = (first * first).sum(-1)
    with np.errstate(all="ignore"):
        factors: Array = (first * second).sum(-1) / np.where(squares == 0, 1.0, squares)
        expected = factors[..., None] * first
        is_near = np.abs(second - expected) <= tolerance * np.abs(expected)
    return factors if is_near.all() and factors[squares > 0].all() else None
