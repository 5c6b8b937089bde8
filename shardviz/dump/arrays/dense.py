"""Arrays of a rank's safetensors file, memory-mapped and read block by block.

A copy would halve the speed. The price: if another process truncates a file in place while it is read, this process
dies. Replacing a file, which is how shardviz writes, or removing it does no harm.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardviz.errors import DumpError
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

DTYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "F64": "<f8", "F32": "<f4", "F16": "<f2"}
"""safetensors' names of the dtypes that can be mapped as they are."""

TYPES_OF = {
    **{"float64": {"F64"}, "float32": {"F32"}, "float16": {"F16"}, "bfloat16": {"F32", "BF16"}, "complex64": {"C64"}},
    **{"int64": {"I64"}, "int32": {"I32"}, "int16": {"I16"}, "int8": {"I8"}, "bool": {"BOOL"}},
    **{"uint64": {"U64"}, "uint32": {"U32"}, "uint16": {"U16"}, "uint8": {"U8"}},
}
"""The dtypes that values of a dtype are written in: numpy has no bfloat16."""

IDS = "I64"
"""The dtype that ids are written in, whatever the dtype of the tensor that held them."""

LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""Bytes of a header: safetensors reads no longer one."""

_HINT = "copy every rank's .safetensors next to its .json, or write the dump again"


@dataclass(frozen=True, slots=True)
class ArrayRequest:
    """An array to read from a rank's file: its name, dtype and shape.

    Attributes:
        key: Its name, `moment/role/name`.
        shape: Its shape.
        dtype: The dtype of the tensor, as the dump names it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def types(self) -> set[str]:
        """The dtypes that it may be written in; empty if any may be."""
        types = TYPES_OF.get(self.dtype, set())
        return types | {IDS} if types and self.key.startswith("stamped/") else types


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_arrays(path: Path, requests: Iterable[ArrayRequest]) -> None:
    """Make sure that a file is whole and has the arrays that are wanted, without reading them.

    Raises:
        DumpError: The file is not there, is not a safetensors file, or has no such array.
    """
    with _open_arrays(path) as file:
        for array in requests:
            _check_shape(file, path, array.key, array.shape)
            dtype = file.get_slice(array.key).get_dtype()
            if array.types and dtype not in array.types:
                listed = " or ".join(sorted(array.types))
                raise DumpError(f"{path} is damaged: {printable(array.key)} is {dtype}, expected {listed}", _HINT)


def read_array(path: Path, key: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Return one array of a given shape, mapped if it can be.

    Raises:
        DumpError: The file is not there, is not a safetensors file, or has no such array.
    """
    with _open_arrays(path) as file:
        _check_shape(file, path, key, shape)
        mapped = _map(path, key, shape)
        array: NDArray[np.generic] = file.get_tensor(key) if mapped is None else mapped
        return array


def read_arrays(path: Path, requests: Iterable[ArrayRequest]) -> dict[str, NDArray[np.generic]]:
    """Return copies of many arrays, by key: the file is opened once.

    Raises:
        DumpError: The file is not there, is not a safetensors file, or lacks one of them.
    """
    with _open_arrays(path) as file:
        arrays = {}
        for array in requests:
            _check_shape(file, path, array.key, array.shape)
            arrays[array.key] = file.get_tensor(array.key)
        return arrays


@contextmanager
def _open_arrays(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb"), safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError as error:
        raise DumpError(f"{path} is missing", _HINT) from error
    except PermissionError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}", "change its permissions") from error
    except (OSError, SafetensorError, msgspec.DecodeError, TypeError, AttributeError, KeyError, ValueError) as error:
        # TypeError and AttributeError: a dtype that numpy does not have. KeyError and what msgspec says:
        # another file than was opened first.
        raise DumpError(f"{path} is damaged: {printable(str(error))}", _HINT) from error


def _check_shape(file: Any, path: Path, key: str, shape: tuple[int, ...]) -> None:
    stored_shape = tuple(file.get_slice(key).get_shape())
    if stored_shape != shape:
        raise DumpError(f"{path} is damaged: {printable(key)} is {list(stored_shape)}, expected {list(shape)}", _HINT)


def _map(path: Path, key: str, shape: tuple[int, ...]) -> NDArray[np.generic] | None:
    """Map one array of a file that safetensors has opened before, and found to be whole.

    Returns:
        The array, read-only; None if it has no elements or its type cannot be mapped.

    Raises:
        DumpError: It is another file by now.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        size = os.fstat(file.fileno()).st_size
        header = file.read(length) if length <= min(size, MAX_HEADER) else b""
        header_entry = msgspec.json.decode(msgspec.json.decode(header, type=dict[str, msgspec.Raw])[key], type=_Entry)
        start, end = header_entry.data_offsets
        if header_entry.shape != shape or LENGTH_BYTES + length + end > size:
            raise DumpError(f"{path} was changed while it was read", _HINT)
        if header_entry.dtype not in DTYPES or start == end:
            return None
        return np.memmap(file, DTYPES[header_entry.dtype], "r", LENGTH_BYTES + length + start, shape)
