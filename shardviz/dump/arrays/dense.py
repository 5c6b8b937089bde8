"""Arrays of a rank's safetensors file, memory-mapped and read block by block.

A copy would halve the speed. The price: if another process truncates a file in place while it is read, this process
dies. Replacing a file, which is how shardviz writes, or removing it does no harm.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np

from shardviz.errors import ChangedError, DumpError
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
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

CHECKSUMS = "sums"
"""In a file's metadata, the checksum of each array, 16 hex digits each, in the order of their names.

It is the sum of its bytes as 64-bit words, little end first. A CRC-32 takes four times as long, longer than a check.
"""

CHECKSUM_DIGITS = 16

METADATA = "__metadata__"
LENGTH_BYTES = 8
WORD = 8
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


def checksums_of(arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, str]:
    """Return the metadata of a file: the checksums of the contiguous arrays that it is written with."""
    sums = (_checksum(array.reshape(-1).view(np.uint8)) for _, array in sorted(arrays.items()))
    return {CHECKSUMS: "".join(sums)}


def _checksum(content: NDArray[np.uint8]) -> str:
    num_words = len(content) // WORD
    total = int(np.add.reduce(content[: num_words * WORD].view("<u8")))
    total += int.from_bytes(content[num_words * WORD :].tobytes(), "little")
    return f"{total % (1 << (8 * WORD)):0{CHECKSUM_DIGITS}x}"


def check_arrays(path: Path, requests: Iterable[ArrayRequest]) -> None:
    """Make sure that a file is whole, has the arrays that are wanted, and has them as they were written.

    Raises:
        ChangedError: An array has other bytes than were written.
        DumpError: The file is not there, is not a safetensors file, or has no such array.
    """
    with _open_arrays(path) as file:
        for array in requests:
            _check_shape(file, path, array.key, array.shape)
            dtype = file.get_slice(array.key).get_dtype()
            if array.types and dtype not in array.types:
                listed = " or ".join(sorted(array.types))
                raise DumpError(f"{path} is damaged: {printable(array.key)} is {dtype}, expected {listed}", _HINT)
        checksums = (file.metadata() or {}).get(CHECKSUMS, "")
        if checksums and (changed := _changed_arrays(path, checksums)):
            first = f"the numbers of {printable(changed[0])}"
            what = first if len(changed) == 1 else f"{first} and of {counted(len(changed) - 1, 'other tensor')}"
            raise ChangedError(f"{path} was damaged after it was written: {what} have a different checksum", _HINT)


def _changed_arrays(path: Path, checksums: str) -> list[str]:
    """Return the names of the arrays that don't have their checksums."""
    with path.open("rb") as file:
        start, header = _read_header(file)
        content = np.memmap(file, np.uint8, "r")
    changed = []
    for at, key in enumerate(sorted(header.keys() - {METADATA})):
        begin, end = msgspec.json.decode(header[key], type=_Entry).data_offsets
        expected = checksums[at * CHECKSUM_DIGITS : (at + 1) * CHECKSUM_DIGITS]
        changed += [key] if _checksum(content[start + begin : start + end]) != expected else []
    return changed


def _read_header(file: BinaryIO) -> tuple[int, dict[str, msgspec.Raw]]:
    """Return where the arrays of a file begin, and its header."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    size = os.fstat(file.fileno()).st_size
    header = file.read(length) if length <= min(size, MAX_HEADER) else b""
    return LENGTH_BYTES + length, msgspec.json.decode(header, type=dict[str, msgspec.Raw])


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
        begin, header = _read_header(file)
        header_entry = msgspec.json.decode(header[key], type=_Entry)
        start, end = header_entry.data_offsets
        if header_entry.shape != shape or begin + end > os.fstat(file.fileno()).st_size:
            raise DumpError(f"{path} was changed while it was read", _HINT)
        if header_entry.dtype not in DTYPES or start == end:
            return None
        return np.memmap(file, DTYPES[header_entry.dtype], "r", begin + start, shape)
