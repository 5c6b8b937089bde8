"""Casts of bits between dtypes, as torch rounds, and other changes of all stored values.

Eight-bit floats are included. Tensors are given as bits, as files have them, and read in blocks: a file that is mapped
into memory is never loaded whole. What differs is mostly seen in the first block. Values may be scaled, shifted,
rounded, or made from others.

Formats keep a number, its logarithm or what a positive function makes of it. A conversion that leaves that out, or does
it twice, has tensors of the right shapes: exp, log, a square and a sigmoid are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.groups import the_only
from shardviz.layout.dtypes import itemsize
from shardviz.relate.factors import factor_at_largest
from shardviz.relate.relations import Offset, Rounded, Scaled
from shardviz.relate.tolerance import EPSILON, FLOATS, ROUNDINGS_OF_SCALE, SAFETY
from shardviz.relate.values import SAMPLES, blocks, is_alike, sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bits = NDArray[Any]
    Values = NDArray[np.float64]


_NUMPY = frozenset({"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"})
_BFLOAT16 = "bfloat16"
_QUIET_NAN = 0x7FC0


def is_narrower(dtype: str, than: str) -> bool:
    """Whether a dtype is the narrower of two: fewer bytes; bfloat16 rather than float16."""
    return (itemsize(dtype), dtype != _BFLOAT16) < (itemsize(than), than != _BFLOAT16)


def is_whole(dtype: str) -> bool:
    """Whether a type has only whole numbers, or truth values."""
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def cast(bits: NDArray[Any], dtype: str, to: str) -> NDArray[Any] | None:
    """Return bits of one type as those of another; None if this is not known how to do.

    Example:
        >>> ones = np.array([1.0, 1.00390625], np.float32).view(np.uint32)
        >>> [hex(bits) for bits in cast(ones, "float32", "bfloat16")]
        ['0x3f80', '0x3f80']
    """
    if dtype == to:
        return bits
    if not {dtype, to} <= _NUMPY | {_BFLOAT16} | EIGHT_BITS.keys() or _is_integer_beside_eight_bits(dtype, to):
        return None
    values = numbers_of(bits, dtype)
    with np.errstate(all="ignore"):
        if to in EIGHT_BITS:
            return EIGHT_BITS[to].rounded(values)
        if to == _BFLOAT16:
            return _to_bfloat16(values.astype(np.float32))
        return values.astype(to).view(f"u{itemsize(to)}")


def numbers_of(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return the numbers that bits of a type stand for."""
    if dtype in EIGHT_BITS:
        numbers: NDArray[Any] = EIGHT_BITS[dtype].values[bits]
        return numbers
    return _from_bfloat16(bits) if dtype == _BFLOAT16 else bits.view(dtype)


def values_of(bits: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Return the numbers that bits of a type stand for, as float64."""
    return numbers_of(np.ascontiguousarray(bits).reshape(bits.shape), dtype).astype(np.float64)


def through(bits: NDArray[Any], dtype: str, narrow: str, to: str) -> NDArray[Any] | None:
    """Cast bits through a narrower type to a third; return None if that isn't known.

    Example:
        >>> bits = np.array([1.00390625], np.float32).view(np.uint32)
        >>> through(bits, "float32", "bfloat16", "float32").view(np.float32).tolist()
        [1.0]
    """
    there = cast(bits, dtype, narrow)
    return None if there is None else cast(there, narrow, to)


def rounded(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Return numbers rounded to a dtype, to nearest and ties to even, as a cast of torch does.

    Example:
        >>> rounded(np.array([1.00390625, 1.01171875]), "bfloat16").tolist()  # halfway between two each
        [1.0, 1.015625]
    """
    wide = np.ascontiguousarray(values, np.float64).reshape(np.shape(values))
    bits = cast(wide.view(np.uint64), "float64", dtype)
    assert bits is not None, "numbers can be rounded to all dtypes that are asked for"
    return values_of(bits, dtype)


def _is_integer_beside_eight_bits(*dtypes: str) -> bool:
    """Whether a cast is between whole numbers and eight bits, which may be raw bits."""
    return any(dtype in EIGHT_BITS for dtype in dtypes) and any("int" in dtype or dtype == "bool" for dtype in dtypes)


def _from_bfloat16(bits: NDArray[Any]) -> NDArray[np.float32]:
    wide: NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, to the even one of two."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: NDArray[np.uint16] = np.asarray((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    np.putmask(rounded, np.isnan(values), _QUIET_NAN)  # not by index: a single number has none
    return rounded


SIGN = 0x80


@dataclass(frozen=True)
class EightBits:
    """A type of eight bits: a sign, an exponent and digits.

    Attributes:
        digits: How many bits the digits have.
        bias: What is taken off the exponent.
        last: The code behind that of the largest number: infinity, or no number.
        infinite: Whether that code is infinity.
    """

    digits: int
    bias: int
    last: int
    infinite: bool = False

    @cached_property
    def grid(self) -> NDArray[np.float64]:
        """The numbers of the codes without a sign up to `last`, which stands for what is too large."""
        codes = np.arange(self.last + 1)
        exponent, digit = codes >> self.digits, codes & ((1 << self.digits) - 1)
        whole = np.where(exponent > 0, 1.0, 0.0) + digit / (1 << self.digits)
        numbers: NDArray[np.float64] = whole * 2.0 ** (np.maximum(exponent, 1) - self.bias)
        return numbers

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """The number of every code."""
        numbers = np.full(SIGN, np.nan, np.float32)
        numbers[: self.last] = self.grid[:-1]
        if self.infinite:
            numbers[self.last] = np.inf
        return np.concatenate([numbers, -numbers])

    def rounded(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Round numbers to the nearest of the type, to the even one of two."""
        size = np.abs(values.astype(np.float64))
        middles = (self.grid[:-1] + self.grid[1:]) / 2
        code = np.searchsorted(middles, size, "left")
        code += (code < len(middles)) & (code % 2 == 1) & (size == middles[np.minimum(code, len(middles) - 1)])
        if not self.infinite:
            code = np.minimum(code, self.last - 1)  # what is too large is the largest
        code = np.where(np.isnan(values), SIGN - 1, code)
        codes: NDArray[np.uint8] = (code + SIGN * np.signbit(values)).astype(np.uint8)
        return codes


EIGHT_BITS = {
    "float8_e4m3fn": EightBits(3, 7, 0x7F),
    "float8_e5m2": EightBits(2, 15, 0x7C, infinite=True),
}
"""The types by torch's names."""


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
        after: The bits that it became.
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
    """Whether values are the upper bits of others, cut off instead of rounded."""
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


FEWEST_VALUES = 4
"""Different numbers of a tensor: functions have fewer values in common by chance, as 1 and its square."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of each element.

    Attributes:
        text: It in torch's words, of `x`.
        inverse: What takes it back, of `y`.
    """

    text: str
    inverse: str
    of: Callable[[Values], Values]


def _softplus(values: Values) -> Values:
    return np.logaddexp(values, 0)


FUNCTIONS = (
    Function("x.exp()", "y.log()", np.exp),
    Function("-x.exp()", "(-y).log()", lambda values: -np.exp(values)),
    Function("(-x).exp()", "-y.log()", lambda values: np.exp(-values)),
    Function("x.log()", "y.exp()", np.log),
    Function("(-x).log()", "-y.exp()", lambda values: np.log(-values)),
    Function("-x.log()", "(-y).exp()", lambda values: -np.log(values)),
    Function("x.square()", "y.sqrt()", lambda values: np.where(values < 0, np.nan, np.square(values))),
    Function("x.sqrt()", "y.square()", np.sqrt),
    Function("x.reciprocal()", "y.reciprocal()", np.reciprocal),
    Function("x.rsqrt()", "y.square().reciprocal()", lambda values: 1 / np.sqrt(values)),
    Function("x.sigmoid()", "y.logit()", lambda values: np.exp(-_softplus(-values))),
    Function("x.logit()", "y.sigmoid()", lambda values: np.log(values / (1 - values))),
    Function("F.softplus(x)", "y.expm1().log()", _softplus),
    Function("x.expm1().log()", "F.softplus(y)", lambda values: np.log(np.expm1(values))),
    Function("x.exp2()", "y.log2()", np.exp2),
    Function("x.log2()", "y.exp2()", np.log2),
    Function("x.tanh()", "y.atanh()", np.tanh),
)
"""Of each number those that the inverse takes back: a root has no sign."""


def function_between(before: NDArray[Any], dtype: str, after: NDArray[Any], to: str) -> Function | None:
    """Return the only function that makes all values of one tensor of another's.

    Args:
        before: The bits of the tensor.
        after: The bits that it became.

    Returns:
        None if none does, or several do; or if the tensor has few different values.
    """
    if dtype not in FLOATS or to not in FLOATS or before.shape != after.shape:
        return None
    pairs = [(values_of(sampled(before), dtype), values_of(sampled(after), to))]
    if len(np.unique(pairs[0][0])) < FEWEST_VALUES or not all(np.isfinite(side).all() for side in pairs[0]):
        return None
    epsilons = EPSILON[dtype], EPSILON[to]
    is_line = _makes(_line_between(*pairs[0]), *pairs[0], epsilons)
    fitting = [function for function in FUNCTIONS if not is_line and _makes(function.of, *pairs[0], epsilons)]
    function = the_only(fitting)
    every = zip(blocks(before), blocks(after), strict=True)
    is_of_all = function is not None and all(
        _makes(function.of, values_of(old, dtype).ravel(), values_of(new, to).ravel(), epsilons) for old, new in every
    )
    return function if is_of_all else None


def _line_between(before: Values, after: Values) -> Callable[[Values], Values]:
    """Return the line that is nearest to a function: of small numbers, or large ones, many functions are one."""
    columns = np.stack([before, np.ones_like(before)], axis=-1).astype(np.float64)
    slope, start = np.linalg.lstsq(columns, after.astype(np.float64), rcond=None)[0]
    return lambda values: slope * values + start


def _makes(function: Callable[[Values], Values], before: Values, after: Values, epsilons: tuple[float, float]) -> bool:
    """Whether a function makes some numbers of others, but for the roundings of both."""
    with np.errstate(all="ignore"):
        made = function(before.astype(np.float64))
        near = np.abs(function(before * (1 + epsilons[0])) - made) + epsilons[1] * np.abs(made)
        return bool(np.all(np.abs(made - after) <= ROUNDINGS_OF_SCALE * near))
