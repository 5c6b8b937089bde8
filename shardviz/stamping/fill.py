"""Fills: values for a tensor of any size and dtype that show where each of them belongs.

Whole ids end where a dtype stops to hold integers: 2^24 in float32, 256 in bfloat16. They could be written one
digit per pass, but then every loader has to run three or four times, and must do the same each time. A fill needs one
load. Its values are drawn from the tensor's name and the position, so that

- sixteen neighbors, in any dim, are found nowhere else: neither in the tensor nor in another of its shape;
- all values of a tensor are different as long as the type has enough of them (4,096 in bfloat16), so that weights of
  norms and biases are placed element by element, however they were permuted;
- no value is zero, which is memory that nobody wrote to, or one, which is a norm that nobody loaded; none is infinite
  or NaN, and all are below 1 (below 4 in 8 bits), so that a forward pass does not overflow;
- a rank can make its own slice by itself: nothing has to be stored, sent or read.

A float32's upper half is the bfloat16 of the same element, and bfloat16 fits into float16: a cast keeps what it shows.
The values of a fill never change between versions, because files are full of them; `VERSION` counts if they have to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.region import indices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.layout.region import Region

VERSION = 1

BLOCK = 1 << 18
"""Elements made at a time: they stay in the cache."""

EXPONENTS = {"float64": (52, 0x7FF), "float32": (23, 0xFF), "bfloat16": (7, 0xFF), "float16": (10, 0x1F)}
"""Where exponents stand in the types whose fills have eight of them or more, as a shift and a mask."""

FEWEST = 256
"""Of fewer values the exponents show nothing."""

MOST_OF_ONE = 0.25
"""The largest part of a fill's values with one exponent: 1/16, or 1/8 in float16, and some by chance. Weights drawn
from a normal distribution have 0.3 or more, those from a uniform one half."""

ROUNDS = 4
"""Rounds in which a position is mixed: with fewer, neighbors far apart still look alike."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Codes:
    """The values of a dtype that fills use, numbered.

    Attributes:
        width: Bytes of an element.
        bits: There are 2 to this power.
        mantissa: Bits of a float's mantissa; 0 for integers.
        sign: Where a float's sign stands; 0 if it has none.
        lowest: What is added to all: the smallest exponent, in its place, or an integer.
    """

    width: int
    bits: int
    mantissa: int = 0
    sign: int = 0
    lowest: int = 1


CODES = {
    "float64": Codes(8, 12, 7, 15, 111 << 7),
    "float32": Codes(4, 12, 7, 15, 111 << 7),
    "bfloat16": Codes(2, 12, 7, 15, 111 << 7),
    "float16": Codes(2, 14, 10, 15, 7 << 10),
    "float8_e4m3fn": Codes(1, 7, 3, 7, 1 << 3),
    "float8_e5m2": Codes(1, 7, 2, 7, 1 << 2),
    "float8_e4m3fnuz": Codes(1, 7, 3, 7, 2 << 3),
    "float8_e5m2fnuz": Codes(1, 7, 2, 7, 2 << 2),
    "float8_e8m0fnu": Codes(1, 5, 0, 0, 96),
    "int8": Codes(1, 6),
    "uint8": Codes(1, 7),
    **{f"{sign}int16": Codes(2, 14) for sign in ("", "u")},
    **{f"{sign}int{bits}": Codes(bits // 8, 30) for sign in ("", "u") for bits in (32, 64)},
}
"""By torch's name. Of float64 and float32 these are the upper 16 bits of a float32; the others are drawn freely."""


def can_fill(dtype: str) -> bool:
    """Whether a dtype has enough values for a fill: bool and complex do not."""
    return dtype in CODES


@dataclass(frozen=True, slots=True)
class Fill:
    """The values of one stamped tensor, as bits.

    Attributes:
        name: The tensor's name, from which they are drawn.
        dtype: Its dtype, by torch's name; one that `can_fill`.

    Example:
        >>> Fill("norm.weight", (4,), "float32").bits.view(np.float32).tolist()
        [0.00030567514477297664, 0.08697415143251419, 0.14554181694984436, -0.024785663932561874]
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def is_distinct(self) -> bool:
        """Whether no two elements are equal, so that a single value shows where it belongs."""
        return self.numel <= 1 << CODES[self.dtype].bits

    @property
    def bits(self) -> NDArray[Any]:
        """All values, as unsigned integers of the element's width, in the tensor's shape."""
        blocks = list(self.blocks())
        kind = np.dtype(f"<u{CODES[self.dtype].width}")
        return (np.concatenate(blocks) if blocks else np.empty(0, kind)).reshape(self.shape)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the values row-major, a block at a time."""
        for first in range(0, self.numel, BLOCK):
            yield self.at(np.arange(first, min(first + BLOCK, self.numel), dtype=np.uint64))

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order; the others are not made."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        lines = [indices(ranges) * stride for ranges, stride in zip(region.dims, strides, strict=True)]
        columns = lines[-1] if lines else np.zeros(1, np.int64)
        rows = reduce(np.add.outer, lines[:-1], np.zeros((), np.int64)).reshape(-1)
        made = np.empty((len(rows), len(columns)), f"<u{CODES[self.dtype].width}")
        width = max(1, min(len(columns), BLOCK))
        for top in range(0, len(rows), height := max(1, BLOCK // width)):
            for left in range(0, len(columns), width):
                at = np.add.outer(rows[top : top + height], columns[left : left + width])
                made[top : top + height, left : left + width] = self.at(at.astype(np.uint64))
        return made.reshape(region.shape)

    def at(self, positions: NDArray[np.uint64]) -> NDArray[Any]:
        """Return the values at row-major positions."""
        codes = CODES[self.dtype]
        key = int.from_bytes(blake2b(self.name.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
        drawn = _random_bits(key, positions)
        number = _permutation(key, positions, codes.bits) if self.is_distinct else drawn >> np.uint64(64 - codes.bits)
        value = _bits_of_numbers(number, codes)
        if codes.mantissa and codes.width >= 4:
            # Bit 15 stays clear, so that rounding to bfloat16 cuts these off and leaves the upper half as it is.
            value = value << np.uint64(16) | drawn & np.uint64(0x7FFF)
        if codes.width == 8 and codes.mantissa:
            value = value.astype("<u4").view("<f4").astype("<f8").view("<u8")
        return value.astype(f"<u{codes.width}")


def _bits_of_numbers(number: NDArray[np.uint64], codes: Codes) -> NDArray[np.uint64]:
    """Return the bits of numbered values; the highest bit of a float's number is its sign."""
    if not codes.sign:
        plain: NDArray[np.uint64] = number + np.uint64(codes.lowest)
        return plain
    unsigned = number & np.uint64((1 << (codes.bits - 1)) - 1)
    sign = number >> np.uint64(codes.bits - 1) << np.uint64(codes.sign)
    signed: NDArray[np.uint64] = unsigned + np.uint64(codes.lowest) | sign
    return signed


def _random_bits(key: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits for each position that look random: splitmix64, begun at a key."""
    mixed: NDArray[np.uint64] = positions * np.uint64(_GOLDEN) + np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MIX[0])
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MIX[1])
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _permutation(key: int, positions: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """Return numbers below 2 to the power of `bits`, another one for each position below that."""
    mask, half = np.uint64((1 << bits) - 1), np.uint64(bits - bits // 2)
    mixed: NDArray[np.uint64] = positions & mask
    for step in _random_bits(key ^ _GOLDEN, np.arange(ROUNDS, dtype=np.uint64)).tolist():
        # Adding, multiplying by an odd number and folding the upper half onto the lower can each be undone.
        mixed = (mixed + np.uint64(step >> 32)) * np.uint64(step | 1) & mask
        mixed ^= mixed >> half
    return mixed


def looks_filled(bits: NDArray[Any], dtype: str) -> bool:
    """Whether values may be a fill: its exponents occur equally often, unlike a real weight's.

    Asked before values are looked for in the fills of all other tensors.

    Args:
        bits: Values, as unsigned integers.
        dtype: Their dtype, by torch's name.

    Example:
        >>> fill = Fill("w", (1000,), "bfloat16")
        >>> looks_filled(fill.bits, "bfloat16"), looks_filled(np.full(1000, 0x3F80, "u2"), "bfloat16")
        (True, False)
    """
    exponents = EXPONENTS.get(dtype)
    if exponents is None or bits.size < FEWEST:
        return True
    shift, mask = exponents
    counts = np.bincount((bits.reshape(-1) >> shift).astype(np.int64) & mask)
    return bool(counts.max() <= bits.size * MOST_OF_ONE)
