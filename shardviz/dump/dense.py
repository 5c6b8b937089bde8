"""One array of a safetensors file, mapped into memory instead of copied: a check reads it once, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

DTYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "F64": "<f8", "F32": "<f4", "F16": "<f2"}
"""safetensors' names of the element types that can be mapped as they are."""

LENGTH_BYTES = 8


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def map_array(path: Path, key: str) -> NDArray[np.generic] | None:
    """Map one array of a file that safetensors has opened before, and found to be whole.

    Returns:
        The array, read-only; None where it has no elements or its type cannot be mapped.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        entries = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    entry = msgspec.json.decode(entries[key], type=_Entry)
    start, end = entry.data_offsets
    if entry.dtype not in DTYPES or start == end:
        return None
    return np.memmap(path, DTYPES[entry.dtype], "r", LENGTH_BYTES + length + start, entry.shape)
