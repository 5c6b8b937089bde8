"""Casts of bits between dtypes, eight-bit floats included, as torch rounds, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.dtypes import itemsize

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
