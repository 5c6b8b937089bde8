"""Eight-bit weights with scales: each value has to be the nearest that its scale allows.

A scale is one number, one for each row, or one for each block (of 128 x 128, as DeepSeek writes them). Nothing is taken
for equal without the scales: a weight in eight bits whose scales are not known is not compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.equality import dtype_of
from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.explain.checkpoints.quantization import InvertedScales, TransposedScales, WrongQuantizationScales
from shardviz.layout.region import index_of
from shardviz.relate.casts import EIGHT_BITS, EightBits, cast, numbers_of
from shardviz.relate.tolerance import QUOTIENT
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Tensor
    from shardviz.explain.cause import Cause

WIDE = ("float64", "float32", "bfloat16", "float16")

BLOCKS = (128, 64, 32, 16, 256, 512)
"""Sizes of blocks that are tried, besides those that divide a dim."""

ROWS = 1 << 18
"""Elements that are compared at a time."""

CODED = ("_qdata", "_packed")
"""What a tensor's name may end in where its scales' names begin as its parameter's."""


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """How many values match their 8-bit codes if each block has its own scale.

    Attributes:
        block: The sizes of a block.
        wrong: The values that are not the nearest.
        first: The flat position of the first of them.
    """

    block: tuple[int, ...]
    wrong: int
    first: int


def judge_scaled(pair: Pair, sides: tuple[Mapping[str, Tensor], ...]) -> tuple[Outcome, str] | None:
    """Return the outcome and scales' name of a weight with eight bits on one side; or None."""
    if (coded_pair := _in_eight_bits(pair)) is None:
        return None
    wide, coded, at = coded_pair
    scales = list(_scales_of(coded, sides[at]))
    if not scales or coded.shape != wide.shape or not wide.shape or 0 in wide.shape:
        return None
    outcome = Outcome(pair.name, pair.other_name, "equal")
    fits = [(scale, fit) for scale in scales for fit in _block_fits(wide, coded, scale, _numbers(scale))]
    if not fits or min(fit.wrong for _, fit in fits):
        for scale in scales:
            if (changed := _with_other_scales(outcome, wide, coded, scale)) is not None:
                return changed, scale.name
    if not fits:
        shapes = listed((f"{printable(one.name)} {list(one.shape)}" for one in scales), 2)
        why = f"how its scales belong to its values {list(coded.shape)} is not known: {shapes}"
        return outcome.became("not-compared", why), scales[0].name
    scale, best = min(fits, key=lambda one: one[1].wrong)
    return _judge_fit(outcome, pair, scale, best), scale.name


def judge_unscaled(outcome: Outcome, pair: Pair) -> Outcome:
    """Mark an 8-bit weight without known scales as not compared, unless it is a plain cast."""
    sides = _in_eight_bits(pair) if outcome.verdict == "other" else None
    if sides is None or sides[0].shape != sides[1].shape:
        return outcome
    wide, coded, _ = sides
    narrowed = cast(wide.bits, wide.dtype, coded.dtype)
    if narrowed is not None and 2 * int((narrowed == coded.bits).sum()) > narrowed.size:
        return outcome
    why = (
        f"it is {wide.dtype} and {coded.dtype}, not by a plain cast, and no scales of {printable(coded.name)} are known"
    )
    return outcome.became("not-compared", why)


def _in_eight_bits(pair: Pair) -> tuple[Tensor, Tensor, int] | None:
    """Return a pair's wide tensor, its eight-bit one, and the latter's side; or None."""
    for at, (coded, wide) in enumerate((pair.both, pair.both[::-1])):
        if dtype_of(coded) in EIGHT_BITS and dtype_of(wide) in WIDE:
            return wide, coded, at
    return None


def _judge_fit(outcome: Outcome, pair: Pair, scale: Tensor, best: ScaleFit) -> Outcome:
    first, second = pair.both
    shape = first.shape
    per = " x ".join(map(str, best.block)) if any(best.block) else "all"
    how = f"{printable(scale.name)} has a scale for {'' if per == 'all' else 'each '}{per}"
    if not best.wrong:
        why = f"{first.dtype} became {second.dtype}, every value the nearest that its scale allows; {how}"
        return outcome.became("cast", why)
    at, size = index_of(best.first, shape), math.prod(shape)
    why = f"{best.wrong:,} of {size:,} values are not the nearest that their scales allow, the first at {at}; {how}"
    return outcome.became("other", why, WrongQuantizationScales())


def _with_other_scales(outcome: Outcome, wide: Tensor, coded: Tensor, scale: Tensor) -> Outcome | None:
    """Explain values that match once the scales are transposed or inverted; None if none do."""
    numbers = _numbers(scale)
    tried: list[tuple[str, NDArray[np.float64], Cause]] = []
    if numbers.ndim == 2 and numbers.size > 1:
        tried.append(("transposed", numbers.T, TransposedScales()))
    with np.errstate(divide="ignore"):
        tried.append(("inverted", 1 / numbers, InvertedScales()))
    for how, others, cause in tried:
        if any(not fit.wrong for fit in _block_fits(wide, coded, scale, others)):
            why = f"with {printable(scale.name)} {how}, every value is the nearest that its scale allows"
            return outcome.became("other", why, cause)
    return None


def _scales_of(coded: Tensor, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that have numbers and whose names say that they are a tensor's scales."""
    stem = coded.name
    for ending in CODED:
        stem = stem.removesuffix(ending)
    for name in (f"{stem}_scale_inv", f"{stem}_scale", f"{stem}.scale", f"{stem}_scales", f"{stem}.scale_inv"):
        scales = tensors.get(name)
        if scales is not None and scales.dtype in (*WIDE, "float8_e8m0fnu") and 0 not in scales.shape:
            yield scales


def _block_fits(wide: Tensor, coded: Tensor, scale: Tensor, scales: NDArray[np.float64]) -> Iterator[ScaleFit]:
    """Yield how well values fit for each block size that the scales' shape allows."""
    loss = max(QUOTIENT[wide.dtype], QUOTIENT.get(scale.dtype, 0.0))
    shape = tuple(one for one in scales.shape if one > 1) and scales.shape
    if not shape:
        yield _fit(wide, coded, scales.reshape((1,) * len(wide.shape)), (0,) * len(wide.shape), loss)
        return
    if len(shape) < len(wide.shape):
        shape = (*shape, *(1,) * (len(wide.shape) - len(shape)))
    if len(shape) == len(wide.shape):
        sizes = [list(_block_sizes(size, count)) for size, count in zip(wide.shape, shape, strict=True)]
        for block in product(*sizes):
            yield _fit(wide, coded, scales.reshape(shape), block, loss)


def _block_sizes(size: int, count: int) -> Iterator[int]:
    """Yield the sizes of blocks that divide a dim into so many: the usual first."""
    if count == 1:
        yield size
        return
    sizes = [one for one in (*BLOCKS, -(-size // count)) if -(-size // one) == count]
    yield from dict.fromkeys(sizes)


def _fit(wide: Tensor, coded: Tensor, scales: NDArray[np.float64], block: tuple[int, ...], loss: float) -> ScaleFit:
    """Return how well values fit with one scale a block; a block size of 0 is a whole dim."""
    shape, line = wide.shape, math.prod(wide.shape[1:])
    rows = max(ROWS // max(line, 1), 1)
    wrong, first = 0, -1
    wide_bits, coded_bits = wide.bits, coded.bits  # asked for once: what is saved in parts is put together each time
    for top in range(0, shape[0], rows):
        stop = min(top + rows, shape[0])
        values = numbers_of(np.ascontiguousarray(wide_bits[top:stop]), wide.dtype).astype(np.float64)
        codes = np.ascontiguousarray(coded_bits[top:stop])
        each = scales[np.ix_(*_numbers_of_blocks(shape, block, (top, stop)))]
        odd = ~_are_nearest(values, codes, each, EIGHT_BITS[coded.dtype], loss)
        wrong += int(odd.sum())
        first = first if first >= 0 or not odd.any() else top * line + int(odd.argmax())
    return ScaleFit(block, wrong, first)


def _numbers_of_blocks(
    shape: tuple[int, ...], block: tuple[int, ...], rows: tuple[int, int]
) -> Iterator[NDArray[np.int64]]:
    """Yield which block each index of each dim is in, for some rows."""
    for dim, (size, by) in enumerate(zip(shape, block, strict=True)):
        indices = np.arange(*(rows if dim == 0 else (0, size)))
        yield indices // by if by else np.zeros_like(indices)


def _are_nearest(
    values: NDArray[np.float64], codes: NDArray[Any], scales: NDArray[np.float64], kind: EightBits, loss: float
) -> NDArray[np.bool_]:
    """Return which codes are the nearest to value / scale, within rounding loss."""
    with np.errstate(all="ignore"):
        expected = np.where(scales == 0, 0, values / scales)
    held = kind.values[codes].astype(np.float64)
    expected, held = expected * np.where(np.signbit(held), -1, 1), np.abs(held)
    place = np.searchsorted(kind.grid, held)
    up = np.where(place >= kind.last - 1, np.inf, kind.grid[np.minimum(place + 1, kind.last)] - held)
    down = held - np.where(place > 0, kind.grid[np.maximum(place - 1, 0)], -kind.grid[1])
    off = expected - held
    room = np.where(off > 0, up, down) / 2
    near = (np.abs(off) <= room + loss * np.abs(expected)) & np.isfinite(held)
    is_nearest: NDArray[np.bool_] = near | (np.isnan(values) & np.isnan(held))
    return is_nearest


def _numbers(scale: Tensor) -> NDArray[np.float64]:
    bits = np.ascontiguousarray(scale.bits)
    if scale.dtype == "float8_e8m0fnu":
        return np.asarray(2.0 ** (bits.astype(np.float64) - 127)).reshape(scale.shape)
    return numbers_of(bits, scale.dtype).astype(np.float64).reshape(scale.shape)
