"""The hash of a tensor's numbers: equal numbers have one, whatever their bits.

-0.0 is 0.0, and any NaN is NaN: which of them a sum gives depends on the order of its terms and on the machine.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.records.base import DIGEST_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

INFINITY = {
    **dict.fromkeys(("float64", "complex128"), np.uint64(0x7FF0 << 48)),
    **dict.fromkeys(("float32", "complex64"), np.uint32(0x7F80 << 16)),
    **{"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)},
    **{"float8_e5m2": np.uint8(0x7C), "float8_e4m3fn": np.uint8(0x7E)},
}
"""By type, the bits beyond which, the sign apart, there is only NaN: those of infinity, or of the largest number."""

CHUNK = 1 << 16
"""Elements that are looked at together: they stay in the processor's cache."""


def hash_of(stored: NDArray[Any], dtype: str, shape: Sequence[int]) -> str:
    """Return 16 hex digits of the BLAKE2b hash of a tensor's dtype, shape and numbers.

    Args:
        stored: The bytes or bits of its elements in memory order, little end first.
        dtype: Its dtype.
        shape: Its shape.
    """
    infinity = INFINITY.get(dtype)
    if infinity is None:
        return hash_of_bytes(stored, dtype, shape)
    hashed = _new_hash(dtype, shape)
    bits = np.ascontiguousarray(stored).reshape(-1).view(infinity.dtype)
    for start in range(0, len(bits), CHUNK):
        hashed.update(_alike(bits[start : start + CHUNK], infinity).data)
    return hashed.hexdigest()


def hash_of_bytes(stored: NDArray[Any], dtype: str, shape: Sequence[int]) -> str:
    """Return the hash of earlier versions, in which -0.0 and each NaN count as they are."""
    hashed = _new_hash(dtype, shape)
    hashed.update(np.ascontiguousarray(stored).reshape(-1).data if stored.size else b"")
    return hashed.hexdigest()


@lru_cache(maxsize=16)
def hash_of_nan(dtype: str, shape: tuple[int, ...]) -> str:
    """Return the hash of a tensor of NaN only; empty if its dtype has no known NaN."""
    infinity = INFINITY.get(dtype)
    if infinity is None:
        return ""
    hashed = _new_hash(dtype, shape)
    num_left = math.prod(shape) * (2 if dtype.startswith("complex") else 1)
    chunk = np.full(min(num_left, CHUNK), infinity + infinity.dtype.type(1))
    for start in range(0, num_left, CHUNK):
        hashed.update(chunk[: num_left - start].data)
    return hashed.hexdigest()


def _new_hash(dtype: str, shape: Sequence[int]) -> hashlib.blake2b:
    return hashlib.blake2b(f"torch.{dtype}{list(shape)}".encode(), digest_size=DIGEST_LENGTH // 2)


def _alike(bits: NDArray[Any], infinity: np.unsignedinteger[Any]) -> NDArray[Any]:
    """Return bits with one form of zero and one of NaN."""
    sign = infinity.dtype.type(1 << (8 * infinity.itemsize - 1))
    size = bits & ~sign
    if size.min() and size.max() <= infinity:
        return bits
    normal_bits = np.where(size, bits, size)
    normal_bits[size > infinity] = infinity + infinity.dtype.type(1)
    return normal_bits
