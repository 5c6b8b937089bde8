"""Arrays of a rank's safetensors file, mapped into memory, not copied: a check reads them once, block by block."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardviz.errors import DumpError
from shardviz.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

DTYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "F64": "<f8", "F32": "<f4", "F16": "<f2"}
"""safetensors' names of the element types that can be mapped as they are."""

LENGTH_BYTES = 8
_HINT = "copy every rank's .safetensors beside its .json, or write the dump again"


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_arrays(path: Path, wanted: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Make sure that a file is whole and has arrays of given names and shapes, none of which is read.

    Raises:
        DumpError: The file is not there, is no safetensors file, or has no such array.
    """
    with _opened(path) as file:
        for key, shape in wanted:
            _check_shape(file, path, key, shape)


def read_array(path: Path, key: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Return one array of a given shape, mapped where it can be.

    Raises:
        DumpError: The file is not there, is no safetensors file, or has no such array.
    """
    with _opened(path) as file:
        _check_shape(file, path, key, shape)
        mapped = _map(path, key)
        array: NDArray[np.generic] = file.get_tensor(key) if mapped is None else mapped
        return array


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError as error:
        raise DumpError(f"{path} is missing", _HINT) from error
    except (OSError, SafetensorError, TypeError, AttributeError) as error:
        # TypeError and AttributeError: an element type that numpy does not have.
        raise DumpError(f"{path} is damaged: {printable(str(error))}", _HINT) from error


def _check_shape(file: Any, path: Path, key: str, shape: tuple[int, ...]) -> None:
    found = tuple(file.get_slice(key).get_shape())
    if found != shape:
        raise DumpError(f"{path} is damaged: {printable(key)} is {list(found)}, expected {list(shape)}", _HINT)


def _map(path: Path, key: str) -> NDArray[np.generic] | None:
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
