"""Dtypes by torch's names, without `torch.`: which names are valid, and bytes an element."""

from __future__ import annotations

import re
from functools import lru_cache

from shardviz.text import did_you_mean

USUAL = (
    *("float32", "float16", "bfloat16", "int64", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("complex64", "bool", "int32", "int16", "int8", "uint8"),
)

HALVES = ("bfloat16", "float16")
"""The floats of two bytes."""

_NAME = re.compile(r"(?:b?float|complex|u?int|qu?int|bits)([0-9]{1,3})[a-z0-9_]{0,24}")
"""By family and bits: a newer torch has types that are not in any list of today."""


def is_dtype(name: str) -> bool:
    """Whether a name is that of a dtype."""
    return name == "bool" or _NAME.fullmatch(name) is not None


@lru_cache(maxsize=256)
def itemsize(name: str) -> int:
    """Return the bytes of one element; 0 for less than a byte, and for a type that is not known."""
    bits = _NAME.fullmatch(name)
    return 1 if name == "bool" else int(bits[1]) // 8 if bits else 0


def dtype_hint(name: str) -> str:
    """Return a hint at the dtype that was meant."""
    return did_you_mean(name, USUAL) or f"such as {', '.join(USUAL[:3])} or {USUAL[3]}"
