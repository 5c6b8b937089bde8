"""A tensor's numbers: in a rank's safetensors file, from runs of ids, as every 2nd, 4th, ... one, a sketch or a hash.

Files are memory-mapped and read block by block. A copy would halve the speed. The price: if another process truncates a
file in place while it is read, this process dies. Replacing a file, which is how shardviz writes, or removing it does
no harm.

A sample's indices with a wider stride are among those with a narrower one, and a part that begins at a multiple of the
stride keeps what the whole keeps of it. So a part can be laid beside the whole wherever both have an element.

A sketch is sixteen numbers, to compare two runs without their values: each is the sum of the elements with signs drawn
for their positions, so that elements in another order give other numbers. The numbers of two tensors are about as far
apart as the tensors themselves are (an AMS sketch; Alon, Matias and Szegedy 1996), to a third of the distance; those of
a tensor times a number are its own times that number.

Equal numbers have one hash, whatever their bits: -0.0 is 0.0, and any NaN is NaN. Which of them a sum gives depends on
the order of its terms and on the machine.
"""

from __future__ import annotations

import hashlib
import math
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np

from shardviz.dump.records.base import DIGEST_LENGTH
from shardviz.errors import ChangedError, DumpError, RefusedError
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
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

RANK = "rank"
"""In a file's metadata, the rank that wrote it: files of two ranks have the same names and shapes."""

SHOWN = 20
"""How many characters a message shows of what the metadata says."""

MOST_SAID = 300
"""Of an error of safetensors, which may quote the header it cannot read."""

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


def metadata_of(rank: int, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, str]:
    """Return the metadata of a rank's file: its rank, and the checksums of its contiguous arrays."""
    sums = (_checksum(array.reshape(-1).view(np.uint8)) for _, array in sorted(arrays.items()))
    return {RANK: str(rank), CHECKSUMS: "".join(sums)}


def _checksum(content: NDArray[np.uint8]) -> str:
    num_words = len(content) // WORD
    total = int(np.add.reduce(content[: num_words * WORD].view("<u8")))
    total += int.from_bytes(content[num_words * WORD :].tobytes(), "little")
    return f"{total % (1 << (8 * WORD)):0{CHECKSUM_DIGITS}x}"


def check_arrays(path: Path, rank: int, requests: Iterable[ArrayRequest]) -> None:
    """Make sure that a file is whole, the rank's own, and has the arrays that are wanted as they were written.

    Raises:
        ChangedError: The file is another rank's, or an array has other bytes than were written.
        DumpError: The file is not there, is not a safetensors file, or has no such array.
    """
    with _open_arrays(path) as file:
        metadata = file.metadata() or {}
        if (writer := metadata.get(RANK, str(rank))) != str(rank):
            raise ChangedError(f"{path} has what rank {printable(writer)[:SHOWN]} wrote, not rank {rank}", _HINT)
        for array in requests:
            _check_shape(file, path, array.key, array.shape)
            dtype = file.get_slice(array.key).get_dtype()
            if array.types and dtype not in array.types:
                listed = " or ".join(sorted(array.types))
                raise DumpError(f"{path} is damaged: {printable(array.key)} is {dtype}, expected {listed}", _HINT)
        checksums = metadata.get(CHECKSUMS, "")
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
        raise RefusedError(f"cannot read {path}: {error.strerror}", "change its permissions") from error
    except (OSError, SafetensorError, msgspec.DecodeError, TypeError, AttributeError, KeyError, ValueError) as error:
        # TypeError and AttributeError: a dtype that numpy does not have. KeyError and what msgspec says:
        # another file than was opened first.
        raise DumpError(f"{path} is damaged: {printable(str(error)[:MOST_SAID])}", _HINT) from error


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


ID_NONE = -1
"""Stands in id arrays for a value that is not an id: NaN, a fraction, or beyond every stamp. Zeros stay 0."""

MAX_ELEMENTS = 1 << 26
"""No array of ids longer than this is made from a dump's ranges or runs."""

MAX_OF_ALL = 1 << 27
"""The arrays that all ranks' ranges or runs of one tensor are laid out to are together no longer than this."""

MAX_DENSE = 1 << 28
"""The longest array of ids that is made from dense values beside the JSON."""


def most_ids(num_ranks: int, *, dense: bool) -> int:
    """Return how many ids of one rank are laid out, if so many ranks hold a tensor."""
    return MAX_DENSE if dense else min(MAX_ELEMENTS, MAX_OF_ALL // max(1, num_ranks))


def expand_runs(runs: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Lay out runs `(first, step, count)` one after the other."""
    run_list = list(runs)
    ids = np.empty(sum(count for _, _, count in run_list), np.int64)
    start = 0
    for first, step, count in run_list:
        stretch = ids[start : start + count]
        stretch[:] = np.arange(count, dtype=np.int64)
        stretch *= step
        stretch += first
        start += count
    return ids


def whole_ids(values: NDArray[np.generic], last: int) -> NDArray[np.int64]:
    """Return values as ids: 0 for zero, `ID_NONE` for values that aren't integers up to `last`."""
    numbers: NDArray[Any] = values.astype(np.float64) if values.dtype.kind == "f" else values
    if numbers.dtype.kind not in "fiu":
        return np.full(numbers.shape, ID_NONE, np.int64)
    whole = (numbers >= 0) & (numbers <= last) & (np.floor(numbers) == numbers)
    ids = np.full(numbers.shape, ID_NONE, np.int64)
    np.copyto(ids, numbers, casting="unsafe", where=whole)  # np.where would put -1 into numpy 2.5's own unsigned type
    return ids


def own_ids(ids: NDArray[np.int64], first: int, numel: int) -> NDArray[np.int64]:
    """Count ids from 1 within the tensor that starts at `first`; foreign ids become `-1 - id`."""
    is_foreign = (ids > 0) & ((ids < first) | (ids >= first + numel))
    shifted = np.asarray(ids - (first - 1))  # numpy makes a number of the difference of an array without dims
    np.copyto(shifted, ids, where=ids <= 0)
    np.copyto(shifted, -1 - ids, where=is_foreign)
    return shifted


PHASE = 0x2B5D
"""Where the kept indices begin: its lowest bits, so that those of a wider stride are among those of a narrower one."""


def kept_indices(size: int, stride: int) -> range:
    """Return the indices that are kept along a dim."""
    return range(PHASE % stride, size, stride)


def strides_for(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """Return strides that keep at most `most` elements; the longest dims are thinned first."""
    strides = [1] * len(shape)
    counts = list(shape)
    while math.prod(counts) > max(most, 1):
        dim = max(range(len(shape)), key=lambda one: counts[one])
        strides[dim] *= 2
        counts[dim] = len(kept_indices(shape[dim], strides[dim]))
    return tuple(strides)


def strides_between(shape: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides that sample a tensor of one shape into a second; None if none do."""
    if len(shape) != len(sampled):
        return None
    strides = [_stride(size, count) for size, count in zip(shape, sampled, strict=True)]
    return None if 0 in strides else tuple(strides)


def _stride(size: int, count: int) -> int:
    """Return the stride that samples a number of indices; 0 if none does."""
    stride = 1
    while len(kept_indices(size, stride)) > count:
        stride *= 2
    return stride if len(kept_indices(size, stride)) == count else 0


INFINITY = {
    **dict.fromkeys(("float64", "complex128"), np.uint64(0x7FF0 << 48)),
    **dict.fromkeys(("float32", "complex64"), np.uint32(0x7F80 << 16)),
    **{"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)},
    **{"float8_e5m2": np.uint8(0x7C), "float8_e4m3fn": np.uint8(0x7E)},
}
"""By type, the bits beyond which, the sign apart, there is only NaN: those of infinity, or of the largest number."""

HASHED_AT_ONCE = 1 << 16
"""Elements that are looked at together: they stay in the processor's cache."""


def hash_of(stored: NDArray[Any], dtype: str, shape: Sequence[int]) -> str:
    """Return 16 hex digits of the BLAKE2b hash of a tensor's dtype, shape and numbers.

    Args:
        stored: The bytes or bits of its elements in memory order, little end first.
    """
    infinity = INFINITY.get(dtype)
    if infinity is None:
        return hash_of_bytes(stored, dtype, shape)
    hashed = _new_hash(dtype, shape)
    bits = np.ascontiguousarray(stored).reshape(-1).view(infinity.dtype)
    for start in range(0, len(bits), HASHED_AT_ONCE):
        hashed.update(_alike(bits[start : start + HASHED_AT_ONCE], infinity).data)
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
    chunk = np.full(min(num_left, HASHED_AT_ONCE), infinity + infinity.dtype.type(1))
    for start in range(0, num_left, HASHED_AT_ONCE):
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


NUMBERS_OF_A_SKETCH = 16
DIGITS_OF_A_NUMBER = 12
"""Digits of each number: enough for steps in float64, which may be apart by a billionth."""
MAX_SKETCHED = 1 << 14
"""Of a larger tensor, so many elements are looked at, at places drawn for its size."""


def sketch(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return a tensor's sketch; empty if it has no elements or its squares overflow.

    Squares overflow if an inspected element is NaN or infinite, and in an attention mask, which has the most negative
    float64.
    """
    places, signs = _places_and_signs(values.size)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = values.ravel()[places] @ signs
        if not places.size or not np.isfinite(numbers @ numbers):
            return ()
    return tuple(float(f"{number:.{DIGITS_OF_A_NUMBER}g}") for number in numbers.tolist())


@lru_cache(maxsize=16)
def _places_and_signs(size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the places that are looked at in a tensor of a size, and the signs of each."""
    count = min(size, MAX_SKETCHED)
    numbers = np.arange(count, dtype=np.uint64)
    starts = (numbers * size // max(count, 1)).astype(np.int64)
    lengths = np.maximum(np.diff(starts, append=size), 1).astype(np.uint64)
    places = starts + (_mixed(numbers + np.uint64(size)) % lengths).astype(np.int64)
    bits = _mixed(places.astype(np.uint64))[:, None] >> np.arange(NUMBERS_OF_A_SKETCH, dtype=np.uint64)
    return places, 1.0 - 2.0 * (bits & np.uint64(1)).astype(np.float64)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each number (SplitMix64), the same in all versions of numpy."""
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = numbers + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def apart(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the relative distance of two sketches; infinite if one is empty."""
    if not first or not second:
        return 0.0 if not first and not second else float("inf")
    first_numbers, second_numbers = np.array(first), np.array(second)
    size = max(float(np.linalg.norm(first_numbers)), float(np.linalg.norm(second_numbers)))
    return float(np.linalg.norm(first_numbers - second_numbers)) / size if size else 0.0
