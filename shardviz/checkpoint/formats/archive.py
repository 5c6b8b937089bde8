"""What `torch.save` wrote, inside a file: where a tensor's bytes are, or a small object.

Nothing is decompressed, and nothing is run.
"""

from __future__ import annotations

import math
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.formats.pickle_reader import Global, PickledObject, read_pickle
from shardviz.errors import DumpError
from shardviz.layout.dtypes import is_dtype, itemsize
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

MAX_DIRECTORY = 1 << 20
"""Bytes of an archive's directory, and of the pickle in it: one tensor takes a few hundred."""

MAX_SAVED = 1 << 26
"""The same for a file of many tensors."""

_END, _END_64, _LOCATOR_64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_END_SIZE, _LOCATOR_SIZE, _ENTRY_SIZE, _LOCAL_SIZE = 22, 20, 46, 30
_ENTRY = "<4s6H3I5H2I"
_STORED = 0
_LARGE = 0xFFFFFFFF
_STORAGES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "ComplexFloat": "complex64"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where a file has a tensor: first byte, dtype, shape and strides.

    Attributes:
        strides: The elements from one index to the next, for each dim.
        start: The byte of the file at which its first element is.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor that is stored row by row."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class _FileSlice:
    """A part of a file: a whole archive, or one of its members."""

    start: int
    size: int


def find_tensor(path: Path, start: int, size: int, name: str) -> FileTensor:
    """Locate the elements of a saved tensor; a few hundred bytes are read.

    Args:
        start: The archive's first byte in it.
        size: The archive's bytes.
        name: What to call it in messages.

    Raises:
        DumpError: It is not an archive of one tensor, or its numbers contradict each other.
    """
    with _reading(path):
        status = path.stat()
    return _find_tensor(path, start, size, name, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=1 << 14)
def _find_tensor(path: Path, start: int, size: int, name: str, version: tuple[int, ...]) -> FileTensor:
    """Locate a saved tensor once in each version of a file: a comparison reads it ten times."""
    where = f"{path}: {printable(name)}"
    with _open_file(path) as file:
        tree, members, root = _content_of(file, _FileSlice(start, size), where)
    try:
        return _file_tensor(_inner_tensor(tree), members, root, where)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DumpError(f"{where} is not a tensor, or damaged", "copy it again") from error


def read_object(path: Path, start: int, size: int, name: str) -> Any:
    """Read a saved object that is made of inert types, such as a list of names.

    Raises:
        DumpError: It is damaged, or made of anything else.
    """
    with _open_file(path) as file:
        return _content_of(file, _FileSlice(start, size), f"{path}: {printable(name)}")[0]


@dataclass(frozen=True, slots=True)
class Archive:
    """A whole file that `torch.save` wrote.

    Attributes:
        tree: What is in it, made of inert types: a tensor is `PickledObject`.
    """

    path: Path
    tree: Any
    _members: dict[str, _FileSlice]
    _root: str

    def tensor(self, pickled: Any, name: str) -> FileTensor | None:
        """Find out where the elements of a tensor in it are; None for what is not a tensor.

        Raises:
            DumpError: Its numbers contradict each other.
        """
        where = f"{self.path}: {printable(name)}"
        if type(pickled) is not PickledObject:
            return None
        try:
            return _file_tensor(_inner_tensor(pickled), self._members, self._root, where)
        except (LookupError, TypeError, ValueError, AttributeError):
            return None


def open_archive(path: Path) -> Archive:
    """Read what `torch.save` wrote into a file, without its tensors.

    Raises:
        DumpError: It is missing or damaged, or has what is not among the types of a checkpoint.
    """
    with _open_file(path) as file:
        file.seek(0, 2)
        return Archive(path, *_content_of(file, _FileSlice(0, file.tell()), str(path), MAX_SAVED))


def _content_of(
    file: BinaryIO, archive: _FileSlice, where: str, most: int = MAX_DIRECTORY
) -> tuple[Any, dict[str, _FileSlice], str]:
    """Return what is pickled in an archive, its members by name, and the folder in it in which they are."""
    members, root = _zip_members(file, archive, where, most)
    tree = read_pickle(_content(file, members[f"{root}data.pkl"], most), where)
    order = members.get(f"{root}byteorder")
    if order is not None and _content(file, order) != b"little":
        raise DumpError(f"{where} is not little-endian", "convert it on the machine that wrote it")
    return tree, members, root


@contextmanager
def _open_file(path: Path) -> Iterator[BinaryIO]:
    with _reading(path), path.open("rb") as file:
        yield file


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say in one line why a file cannot be opened or read."""
    try:
        yield
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror or error}", "copy the checkpoint again") from error


def _zip_members(file: BinaryIO, archive: _FileSlice, where: str, most: int) -> tuple[dict[str, _FileSlice], str]:
    """Return the members of an archive by name, and the folder in it in which they are."""
    try:
        members = _members(file, archive, most)
        root = next(name for name in members if name.endswith("data.pkl")).removesuffix("data.pkl")
    except (ValueError, StopIteration, struct.error) as error:
        why = f": {error}" if str(error) else ""
        raise DumpError(f"{where} is not what torch.save writes, or damaged{why}", "copy it again") from error
    return members, root


def _members(file: BinaryIO, archive: _FileSlice, most: int) -> dict[str, _FileSlice]:
    count, size, offset = _directory(file, archive)
    if not 0 <= size <= most:
        raise ValueError(f"a directory of {size:,} bytes")
    directory, at, members = _bytes_of(file, archive, offset, size), 0, {}
    for _ in range(count):
        fields = struct.unpack_from(_ENTRY, directory, at)
        method, packed, plain, local = (fields[index] for index in (4, 8, 9, 16))
        name_size, extra_size, comment = fields[10:13]
        begin = at + _ENTRY_SIZE
        name = directory[begin : begin + name_size].decode()
        extra = directory[begin + name_size : begin + name_size + extra_size]
        packed, plain, local = _large((packed, plain, local), extra)
        if method != _STORED or packed != plain:
            raise ValueError(f"{printable(name)} is compressed")
        members[name] = _FileSlice(_first_byte(file, archive, local, plain), plain)
        at += _ENTRY_SIZE + name_size + extra_size + comment
    return members


def _directory(file: BinaryIO, archive: _FileSlice) -> tuple[int, int, int]:
    """Return how many members an archive's directory has, its bytes, and where it is."""
    end = _bytes_of(file, archive, archive.size - _END_SIZE, _END_SIZE)
    if end[:4] != _END:
        raise ValueError("it has no directory at its end")
    count, size, offset = struct.unpack_from("<HII", end, 10)
    if _LARGE in (size, offset) or count == 0xFFFF:
        locator = _bytes_of(file, archive, archive.size - _END_SIZE - _LOCATOR_SIZE, _LOCATOR_SIZE)
        (at,) = struct.unpack_from("<Q", locator, 8)
        end = _bytes_of(file, archive, at, 56)
        if locator[:4] != _LOCATOR_64 or end[:4] != _END_64:
            raise ValueError("its directory is damaged")
        count, size, offset = struct.unpack_from("<QQQ", end, 32)
    return min(count, size // _ENTRY_SIZE), size, offset


def _large(sizes: tuple[int, int, int], extra: bytes) -> tuple[int, int, int]:
    """Return sizes with those that a zip64 record replaces."""
    replaced, at = list(sizes), 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = [at + 4 + 8 * index for index in range(length // 8)]
            for index in (1, 0, 2):  # the plain size comes first
                if replaced[index] == _LARGE and wide:
                    (replaced[index],) = struct.unpack_from("<Q", extra, wide.pop(0))
        at += 4 + length
    return replaced[0], replaced[1], replaced[2]


def _first_byte(file: BinaryIO, archive: _FileSlice, local: int, size: int) -> int:
    """Return where a member's content begins in the file: behind a header of its own."""
    header = _bytes_of(file, archive, local, _LOCAL_SIZE)
    if header[:4] != b"PK\x03\x04":
        raise ValueError("a member has no header")
    name, extra = struct.unpack_from("<HH", header, 26)
    start = local + _LOCAL_SIZE + int(name) + int(extra)
    if start + size > archive.size:
        raise ValueError(f"a member ends at byte {start + size:,} of {archive.size:,}")
    return archive.start + start


def _bytes_of(file: BinaryIO, archive: _FileSlice, offset: int, size: int) -> bytes:
    if offset < 0 or offset + size > archive.size:
        raise ValueError(f"bytes {offset:,} to {offset + size:,} of {archive.size:,}")
    file.seek(archive.start + offset)
    content = file.read(size)
    if len(content) != size:
        raise ValueError("the file ends before it does")
    return content


def _content(file: BinaryIO, member: _FileSlice, most: int = MAX_DIRECTORY) -> bytes:
    file.seek(member.start)
    return file.read(min(member.size, most))


def _inner_tensor(pickled: Any) -> Any:
    """Return the tensor within a parameter, or under a type and attributes of its own."""
    if type(pickled) is PickledObject and pickled.kind.startswith("torch._utils._rebuild_parameter"):
        return pickled.args[0]
    if type(pickled) is PickledObject and pickled.kind == "torch._tensor._rebuild_from_type_v2":
        function, _, args, _ = pickled.args
        return PickledObject(function.name, args)
    return pickled


def _file_tensor(tensor: Any, members: dict[str, _FileSlice], root: str, where: str) -> FileTensor:
    if type(tensor) is not PickledObject or not tensor.kind.startswith("torch._utils._rebuild_tensor_v"):
        raise TypeError
    storage, first, shape, strides = tensor.args[:4]
    _, kind, key, *_ = storage.args
    dtype = _dtype(kind, tensor.args)
    member = members[f"{root}data/{key}"]
    width = itemsize(dtype)
    numbers = (first, *shape, *strides)
    if not is_dtype(dtype) or not width or len(shape) != len(strides) or any(type(one) is not int for one in numbers):
        raise TypeError
    steps = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    last = first + 1 + steps if math.prod(shape) else 0
    if min(numbers) < 0 or last * width > member.size:
        raise DumpError(
            f"{where} is damaged: {dtype}{list(shape)} ends at byte {last * width:,} of {member.size:,}",
            "copy it again",
        )
    return FileTensor(dtype, tuple(shape), tuple(strides), member.start + first * width)


def _dtype(kind: Global, args: Sequence[Any]) -> str:
    name = kind.name.removeprefix("torch.")
    if name == "storage.UntypedStorage":
        return next(str(arg.name) for arg in args if type(arg) is Global).removeprefix("torch.")
    return _STORAGES[name.removesuffix("Storage")]
