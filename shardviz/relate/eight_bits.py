"""Floating-point numbers of eight bits, as torch rounds to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        found: NDArray[np.float64] = whole * 2.0 ** (np.maximum(exponent, 1) - self.bias)
        return found

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """The number of every code."""
        found = np.full(SIGN, np.nan, np.float32)
        found[: self.last] = self.grid[:-1]
        if self.infinite:
            found[self.last] = np.inf
        return np.concatenate([found, -found])

    def rounded(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Round numbers to the nearest of the type, to the even one of two."""
        size = np.abs(values.astype(np.float64))
        middles = (self.grid[:-1] + self.grid[1:]) / 2
        code = np.searchsorted(middles, size, "left")
        code += (code < len(middles)) & (code % 2 == 1) & (size == middles[np.minimum(code, len(middles) - 1)])
        if not self.infinite:
            code = np.minimum(code, self.last - 1)  # what is too large is the largest
        code = np.where(np.isnan(values), SIGN - 1, code)
        found: NDArray[np.uint8] = (code + SIGN * np.signbit(values)).astype(np.uint8)
        return found


EIGHT_BITS = {
    "float8_e4m3fn": EightBits(3, 7, 0x7F),
    "float8_e5m2": EightBits(2, 15, 0x7C, infinite=True),
}
"""The types by torch's names."""
