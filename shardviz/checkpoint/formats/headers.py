"""Safetensors: files whose header says where each tensor is, folders of them, and DCP's own writer of them.

A header may say which part of a tensor a file has (`DCP_SHARDING_INFO`); else it has all of it.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from shardviz.checkpoint.records import MAX_SIZE, Checkpoint, Chunk, Place, Saved, file_size
from shardviz.dump.pause import collector_paused
from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.layout.region import MAX_DIMS
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

LENGTH_BYTES = 8
"""Bytes before a header, which count those of the header."""

MAX_HEADER = 100_000_000
"""Bytes of a header: safetensors itself refuses a longer one."""

MAX_JSON = 1 << 28
"""Bytes of an index or of a model's settings."""

INDEX = "model.safetensors.index.json"

DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
"""How safetensors names element types, and how torch does."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Header(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Entry(msgspec.Struct):
    """A tensor, or the notes, in which nothing of it has to be."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, int] | None = None


class _Notes(msgspec.Struct):
    sharding: str = msgspec.field(name="DCP_SHARDING_INFO", default="")


class _Sharded(msgspec.Struct):
    saved_offsets: tuple[int, ...]


class _Settings(msgspec.Struct):
    tie_word_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class Contents:
    """A folder's files and what an index says of them.

    Attributes:
        files: The files to read.
        indexed: The file that an index names for each tensor; empty without an index.
    """

    files: tuple[Path, ...]
    indexed: dict[str, str] = field(default_factory=dict)


def read_safetensors(path: Path) -> Checkpoint:
    """Read the headers of a safetensors file, or of a folder of them with or without an index.

    Files that an index names and that are missing are left out: a check reports them.

    Raises:
        DumpError: There is no such file, or one is damaged: the message names the file and what was expected.
    """
    contents = _contents(path) if path.is_dir() else Contents((path,))
    folder = path if path.is_dir() else path.parent
    found: dict[str, list[tuple[Chunk, str]]] = {}
    with collector_paused():
        for file in contents.files:
            for name, dtype, chunk in _chunks(file):
                found.setdefault(name, []).append((chunk, dtype))
        tensors = {name: _whole(name, chunks, folder) for name, chunks in found.items()}
    return Checkpoint(path, "safetensors", tensors, indexed=contents.indexed, tied=_tied(folder))


def index_in(folder: Path) -> Path | None:
    """Return a folder's index: by transformers' name for it, or the only one of another; None where there is none."""
    index = folder / INDEX
    if index.is_file():
        return index
    others = sorted(folder.glob("*.safetensors.index.json"))
    return others[0] if len(others) == 1 else None


def _contents(folder: Path) -> Contents:
    index = index_in(folder)
    if index is None:
        return Contents(tuple(path for path in sorted(folder.glob("*.safetensors")) if path.is_file()))
    indexed = _read_index(index)
    names = sorted(set(indexed.values()))
    return Contents(tuple(folder / name for name in names if file_size(folder / name) is not None), indexed)


def _read_index(index: Path) -> dict[str, str]:
    try:
        indexed = msgspec.json.decode(_read_json(index), type=_Index).weight_map
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise DumpError(f"{index} is damaged: {printable(str(error))}", "copy it again") from error
    outside = next((name for name in dict.fromkeys(indexed.values()) if not is_plain(name)), None)
    if outside is not None:
        raise DumpError(
            f"{index} names a file outside its folder: {printable(outside)[:200]}", "copy the checkpoint again"
        )
    return indexed


def is_plain(name: str) -> bool:
    """Whether a file's name is one in the folder itself."""
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\:\0") and len(name) < 256


def _read_json(path: Path) -> bytes:
    size = file_size(path)
    if size is None or size > MAX_JSON:
        raise DumpError(f"{path} is not a file of up to {MAX_JSON:,} bytes", "copy it again")
    return path.read_bytes()


def _tied(folder: Path) -> bool:
    """Whether the model's settings beside its weights say that its embeddings are tied."""
    try:
        return msgspec.json.decode(_read_json(folder / "config.json"), type=_Settings).tie_word_embeddings
    except (OSError, ValueError, DumpError, msgspec.DecodeError, RecursionError):
        return False


def _chunks(path: Path) -> Iterator[tuple[str, str, Chunk]]:
    size = file_size(path)
    if size is None:
        raise DumpError(f"{path} does not exist", "give a safetensors file, or a folder of them")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 2 <= length <= min(MAX_HEADER, size - LENGTH_BYTES):
                raise DumpError(f"{path} is not a safetensors file", "give a safetensors file, or a folder of them")
            found, notes = _header(file.read(length))
        offsets = _offsets(notes)
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise DumpError(f"{path} is damaged: {printable(str(error))}", "copy it again") from error
    for name, one in found.items():
        _refuse_damaged(path, name, one, size - LENGTH_BYTES - length)
        begin, end = one.data_offsets
        dtype = DTYPES.get(one.dtype, one.dtype.lower())
        at = offsets[name].saved_offsets if name in offsets else (0,) * len(one.shape)
        if offsets and (len(at) != len(one.shape) or not all(0 <= place <= MAX_SIZE for place in at)):
            raise DumpError(
                f"{path} is damaged: {printable(name)} of {list(one.shape)} is at {list(at)}", "copy it again"
            )
        place = Place(path.name, LENGTH_BYTES + length + begin, end - begin)
        yield name, dtype, Chunk(at, one.shape, place, dtype)


def _header(text: bytes) -> tuple[dict[str, _Header], msgspec.Raw | None]:
    """Return a header's tensors, and its notes; almost always it has none but the format, and is read in one go."""
    if b"DCP_SHARDING_INFO" not in text:
        with suppress(msgspec.ValidationError):  # what is wrong with which is said below
            found = msgspec.json.decode(text, type=dict[str, _Entry])
            found.pop("__metadata__", None)
            whole = {
                name: _Header(one.dtype, one.shape, one.data_offsets)
                for name, one in found.items()
                if one.dtype and one.shape is not None and one.data_offsets is not None
            }
            if len(whole) == len(found):
                return whole, None
    header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    notes = header.pop("__metadata__", None)
    return {name: msgspec.json.decode(raw, type=_Header) for name, raw in header.items()}, notes


def _offsets(notes: msgspec.Raw | None) -> dict[str, _Sharded]:
    if notes is None:
        return {}
    sharding = msgspec.json.decode(notes, type=_Notes).sharding
    return msgspec.json.decode(sharding, type=dict[str, _Sharded]) if sharding else {}


def _refuse_damaged(path: Path, name: str, one: _Header, data_size: int) -> None:
    begin, end = one.data_offsets
    width = itemsize(DTYPES.get(one.dtype, ""))
    fits = end - begin == math.prod(one.shape) * width if width else end >= begin
    if len(one.shape) > MAX_DIMS or min(one.shape, default=0) < 0 or begin < 0 or not fits or end > data_size:
        what = f"{printable(one.dtype)}{list(one.shape[:MAX_DIMS])} in bytes {begin} to {end} of {data_size:,}"
        raise DumpError(f"{path} is damaged: {printable(name)} is {what}", "copy it again")


def _whole(name: str, chunks: Iterable[tuple[Chunk, str]], folder: Path) -> Saved:
    """Return the tensor that chunks are of: as large as they reach, as DCP's own reader takes it."""
    parts, dtypes = zip(*chunks, strict=True)
    if len(parts) == 1 and not any(parts[0].offsets):
        return Saved(name, parts[0].sizes, dtypes[0], parts, folder)
    if len({len(chunk.sizes) for chunk in parts}) > 1:
        shapes = " and ".join(f"{list(chunk.sizes)} in {chunk.place.file}" for chunk in parts[:2] if chunk.place)
        raise DumpError(f"{folder}: {printable(name)} is {shapes}", "keep one of them")
    reach = [[at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in parts]
    shape = tuple(max(ends) for ends in zip(*reach, strict=True))
    return Saved(name, shape, dtypes[0], tuple(parts), folder)
