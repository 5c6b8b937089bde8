"""How a tensor changed: its order, padding, a rounding, a factor, or different values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.block_factors import scaled_in_blocks
from shardviz.checkpoint.comparing.equality import narrower
from shardviz.checkpoint.comparing.lengths import explain_padding, explain_repeats, explain_shift
from shardviz.checkpoint.comparing.orders import is_long_line, name_change
from shardviz.checkpoint.comparing.outcome import Distance
from shardviz.checkpoint.comparing.undo import cause_of_order
from shardviz.checkpoint.records import StoredTensor
from shardviz.explain.checkpoints.conversion import (
    CutOffDigits,
    ForgottenFactor,
    ForgottenOffset,
    NarrowedOnTheWay,
)
from shardviz.layout.region import box_of, index_of
from shardviz.relate.casts import cast, is_cut_off, line_between, numbers_of, rounding_between, values_of
from shardviz.relate.relations import Scaled
from shardviz.relate.tolerance import FLOATS, WHOLE_FACTOR
from shardviz.relate.values import blocks, is_alike, part_of
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.records import Tensor
    from shardviz.layout.region import Region

SIDES = ("the first", "the second")
NARROW = ("bfloat16", "float16")
WIDE = ("float32", "float64")
MORE, LESS = ("more", "subtract"), ("less", "add")
CUT = {"float32": 16}
"""Bits that are cut off of a type to have the upper half of it, which is a bfloat16."""

FEW = 64
"""Values that are too few for a correlation."""

FLAT = 1e-9
"""The part of the sum of squares that a tensor of one number has around its mean, by rounding alone."""

MOST_DIGITS = 17
"""Digits that tell any two numbers of 64 bits apart."""


def change_of(outcome: Outcome, before: Tensor, after: Tensor, names: tuple[str, str] = SIDES) -> Outcome:
    """Say what became of a tensor.

    Args:
        outcome: Its names.
        before: What it was.
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
    if changed := explain_padding(outcome, before_bits, after_bits, names):
        return replace(changed, why=f"{changed.why}{types}")
    if not is_long_line(before_bits) and (changed := explain_shift(outcome, before_bits, after_bits, names)):
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
    squares = 0.0
    for parts in zip(blocks(before.bits), blocks(after.bits), strict=True):
        old, new = (values_of(part, side.dtype).ravel() for part, side in zip(parts, (before, after), strict=True))
        with np.errstate(all="ignore"):
            sums += [old.sum(), new.sum(), old @ old, new @ new, old @ new]
            squares += float((new - old) @ (new - old))
    if not np.isfinite([*sums, squares]).all() or sums[2] == 0:
        return None
    count = math.prod(before.shape)
    spread = [sums[2] - sums[0] ** 2 / count, sums[3] - sums[1] ** 2 / count]
    is_flat = any(one <= FLAT * whole for one, whole in zip(spread, sums[2:4], strict=True))
    both = sums[4] - sums[0] * sums[1] / count
    correlation = None if is_flat else float(both / math.sqrt(spread[0] * spread[1]))
    return Distance(math.sqrt(squares / sums[2]), correlation)


def counted_differences(
    before: Tensor, after: Tensor, before_bits: NDArray[Any], after_bits: NDArray[Any], names: tuple[str, str]
) -> str:
    """Say how many values differ, and which; both bits are in the narrower of the two dtypes."""
    if before.shape != after.shape:
        return f"{before.dtype}{list(before.shape)} became {after.dtype}{list(after.shape)}"
    if before_bits.size == 1 and (old := _first_text(before)) != (new := _first_text(after)):
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


def _first_text(side: Tensor) -> str:
    return _number_text(side.bits, side.dtype)


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
    names: tuple[str, str] = SIDES,
    through: Sequence[str] | None = None,
) -> Outcome | None:
    """Say that all values were rounded, scaled or shifted by a number; None if they weren't.

    Args:
        outcome: Its names.
        before: What it was.
        after: What it is.
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
        return None
    dtypes = "" if before.dtype == after.dtype else f"; {before.dtype} and {after.dtype}"
    if isinstance(relation, Scaled):
        why = f"every value of {names[1]} is {factor_text(relation.factor)} times that of {names[0]}{dtypes}"
        return outcome.became("other", why, ForgottenFactor(factor_text(1 / relation.factor), relation.factor))
    size, (how, undo) = number_text(abs(relation.number)), MORE if relation.number > 0 else LESS
    why = f"every value of {names[1]} is {size} {how} than in {names[0]}{dtypes}"
    return outcome.became("other", why, ForgottenOffset(undo, size))


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
    return NARROW if dtype in WIDE and to in (dtype, *NARROW) else ()


def overflown(wide: NDArray[Any], dtype: str, to: str) -> str:
    """Say how many values a cast made infinite; empty if it made none."""
    count = 0
    for block in blocks(wide):
        narrow = cast(block, dtype, to)
        if narrow is not None:
            count += int((np.isinf(values_of(narrow, to)) & np.isfinite(values_of(block, dtype))).sum())
    return f"{count:,} of {wide.size:,} values are too large for {to} and became infinite" if count else ""


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
