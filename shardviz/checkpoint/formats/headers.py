"""Safetensors files and folders, including those that DCP's own writer makes.

A header may say which part of a tensor a file has (`DCP_SHARDING_INFO`); else it has all of it.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import msgspec

from shardviz.checkpoint.records import MAX_SIZE, ByteRange, Checkpoint, Chunk, StoredTensor, file_size
from shardviz.errors import DumpError
from shardviz.groups import the_only
from shardviz.layout.dtypes import itemsize
from shardviz.layout.region import MAX_DIMS
from shardviz.machine import collector_paused
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

LENGTH_BYTES = 8
"""Bytes before a header, which count those of the header."""

MAX_HEADER = 100_000_000
"""Bytes of a header: safetensors itself refuses a longer one."""

MAX_JSON = 1 << 28
"""Bytes of an index or of a model's settings."""

_RANK = re.compile(r"(?:(?:^|[-_.])(?:[a-z]{2}_)?rank[-_]?|^consolidated\.)([0-9]{1,6})(?![0-9])", re.IGNORECASE)
"""A rank's number in the name of a file or folder: Megatron's `mp_rank_00`, Meta's `consolidated.00.pth`."""

INDEX_ENDING = ".index.json"
INDEX = f"model.safetensors{INDEX_ENDING}"
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
"""How safetensors names dtypes, and how torch does."""

WIDTHS = {name: itemsize(dtype) for name, dtype in DTYPES.items()}
"""Bytes of an element of each."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Header(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Entry(msgspec.Struct):
    """A header's entry: a tensor, or the notes, which have none of these fields."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, int] | None = None


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])


class _Notes(msgspec.Struct):
    sharding: str = msgspec.field(name="DCP_SHARDING_INFO", default="")


class _ShardOffsets(msgspec.Struct):
    saved_offsets: tuple[int, ...]


class _Settings(msgspec.Struct):
    tie_word_embeddings: bool = False


def read_safetensors(path: Path) -> Checkpoint:
    """Read the headers of a safetensors file, or of a folder of them with or without an index.

    Files that an index names and that are missing are left out: a check reports them.

    Raises:
        DumpError: There is no such file, or one is damaged: the message names the file and what was expected.
    """
    folder = path if path.is_dir() else path.parent
    index = index_in(folder) if path.is_dir() else None
    indexed = _read_index(index) if index is not None else {}
    sizes = {path.name: file_size(path)}
    if path.is_dir():
        names = sorted(set(indexed.values())) if index else sorted(file.name for file in folder.glob("*.safetensors"))
        sizes = {name: size for name in names if (size := file_size(folder / name)) is not None}
    chunks_by_name: dict[str, list[Chunk]] = {}
    with collector_paused():
        for name, size in sizes.items():
            _add_chunks(chunks_by_name, folder / name, size)
        if path.is_dir() and not indexed:
            _refuse_parts_of_ranks(path, list(sizes), chunks_by_name)
        tensors = {name: _whole_tensor(name, chunks, folder) for name, chunks in chunks_by_name.items()}
    tied = _says_tied(folder)
    single = index.name.removesuffix(INDEX_ENDING) if index is not None else ""
    second_set = single if single and single not in sizes and (folder / single).is_file() else ""
    return Checkpoint(path, "safetensors", tensors, indexed=indexed, tied=tied, sizes=sizes, second_set=second_set)


def is_of_rank(name: str) -> bool:
    """Whether the name of a file or folder has a rank's number in it."""
    return _RANK.search(name) is not None


def of_ranks(names: Iterable[str]) -> list[str]:
    """Return the names of ranks' parts: files or folders that differ in their rank's number alone.

    Example:
        >>> of_ranks(["tp_rank_00.safetensors", "tp_rank_01.safetensors", "config.json"])
        ['tp_rank_00.safetensors', 'tp_rank_01.safetensors']
    """
    groups: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if match := _RANK.search(name):
            groups.setdefault(f"{name[: match.start(1)]}*{name[match.end(1) :]}", {})[int(match[1])] = name
    most = max(groups.values(), key=len, default={})
    return list(most.values()) if len(most) > 1 and sorted(most) == list(range(len(most))) else []


def _refuse_parts_of_ranks(folder: Path, files: list[str], chunks_by_name: Mapping[str, list[Chunk]]) -> None:
    """Refuse files of ranks that have the same names, and do not say which part of a tensor they have."""
    ranks = of_ranks(files)
    again = sum(len(chunks) > 1 for chunks in chunks_by_name.values())
    has_places = any(any(chunk.offsets) for chunks in chunks_by_name.values() for chunk in chunks)
    if ranks and 2 * again > len(chunks_by_name) and not has_places:
        raise DumpError(*refusal_of_ranks(folder, ranks))


def refusal_of_ranks(folder: Path, ranks: Sequence[str]) -> tuple[str, str]:
    """Return the error and the hint for files of ranks that have parts of tensors."""
    some = listed(map(printable, ranks))
    what = f"{folder} has the parts of {len(ranks)} ranks ({some}), and nothing in them says how they are joined"
    return what, "join them first, with the converter of the framework that wrote them; or give one of them"


def index_in(folder: Path) -> Path | None:
    """Return a folder's index: that of transformers' name, or the only one; None without one."""
    index = folder / INDEX
    if index.is_file():
        return index
    return the_only(list(folder.glob("*.safetensors.index.json")))


def _read_index(index: Path) -> dict[str, str]:
    try:
        indexed = msgspec.json.decode(read_json(index), type=_Index).weight_map
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


def read_json(path: Path) -> bytes:
    """Return what a small file beside a checkpoint has.

    Raises:
        DumpError: It is none, or too large.
    """
    size = file_size(path)
    if size is None or size > MAX_JSON:
        raise DumpError(f"{path} is not a file of up to {MAX_JSON:,} bytes", "copy it again")
    return path.read_bytes()


def _says_tied(folder: Path) -> bool:
    """Whether the model's settings beside its weights say that its embeddings are tied."""
    try:
        return msgspec.json.decode(read_json(folder / "config.json"), type=_Settings).tie_word_embeddings
    except (OSError, ValueError, DumpError, msgspec.DecodeError, RecursionError):
        return False


def _refuse_cut(path: Path, length: int, size: int, first: bytes) -> None:
    """Refuse a file that is empty, ends within its header, or begins with something else."""
    if size == 0:
        raise DumpError(f"{path} is empty", "copy it again, or save it again")
    if size < LENGTH_BYTES and path.suffix == ".safetensors":
        has = f"{size} of the {LENGTH_BYTES} bytes that say how long its header is"
        raise DumpError(f"{path} is cut short: it has {has}", "copy it again")
    if size >= LENGTH_BYTES and first in (b"{", b"") and max(2, size - LENGTH_BYTES + 1) <= length <= MAX_HEADER:
        has = f"{size - LENGTH_BYTES:,} of the {length:,} bytes of its header"
        raise DumpError(f"{path} is cut short: it has {has}", "copy it again")
    if not 2 <= length <= min(MAX_HEADER, size - LENGTH_BYTES):
        raise DumpError(f"{path} is not a safetensors file", "give a safetensors file, or a folder of them")


def _add_chunks(chunks_by_name: dict[str, list[Chunk]], path: Path, size: int | None) -> None:
    """Add what a file's header says that it has.

    Raises:
        DumpError: The file is missing or damaged.
    """
    if size is None:
        raise DumpError(f"{path} does not exist", "give a checkpoint: a safetensors or .pt file, or a folder of one")
    try:
        with open(path, "rb", buffering=0) as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            _refuse_cut(path, length, size, file.read(1))
            file.seek(LENGTH_BYTES)
            header, notes = _header(file.read(length))
        offsets = _offsets(notes)
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise DumpError(f"{path} is damaged: {printable(str(error))}", "copy it again") from error
    file_name, data_start = path.name, LENGTH_BYTES + length
    for name, tensor in header.items():
        shape, (begin, end) = tensor.shape, tensor.data_offsets
        _refuse_damaged(path, name, tensor, size - data_start)
        at = (0,) * len(shape)
        if offsets:
            at = offsets[name].saved_offsets if name in offsets else at
            if len(at) != len(shape) or not all(0 <= place <= MAX_SIZE for place in at):
                what = f"{printable(name)} of {list(shape)} is at {list(at)}"
                raise DumpError(f"{path} is damaged: {what}", "copy it again")
        chunk = Chunk(
            at,
            shape,
            ByteRange(file_name, data_start + begin, end - begin),
            DTYPES.get(tensor.dtype) or printable(tensor.dtype.lower()),
        )
        chunks_by_name.setdefault(name, []).append(chunk)


def _header(text: bytes) -> tuple[Mapping[str, _Header], msgspec.Raw | None]:
    """Return a header's tensors and its notes; a plain header is decoded in one go."""
    if b"DCP_SHARDING_INFO" not in text:
        with suppress(msgspec.ValidationError):  # the error below names what is wrong
            entries = _ENTRIES.decode(text)
            entries.pop("__metadata__", None)
            if all(one.dtype and one.shape is not None and one.data_offsets is not None for one in entries.values()):
                return cast("dict[str, _Header]", entries), None
    header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    notes = header.pop("__metadata__", None)
    return {name: msgspec.json.decode(raw, type=_Header) for name, raw in header.items()}, notes


def _offsets(notes: msgspec.Raw | None) -> dict[str, _ShardOffsets]:
    if notes is None:
        return {}
    sharding = msgspec.json.decode(notes, type=_Notes).sharding
    return msgspec.json.decode(sharding, type=dict[str, _ShardOffsets]) if sharding else {}


def _refuse_damaged(path: Path, name: str, tensor: _Header, data_size: int) -> None:
    shape, (begin, end) = tensor.shape, tensor.data_offsets
    width = WIDTHS.get(tensor.dtype, 0)
    fits = end - begin == math.prod(shape) * width if width else end >= begin
    if not fits or begin < 0 or end > data_size or len(shape) > MAX_DIMS or min(shape, default=0) < 0:
        what = f"{printable(tensor.dtype)}{list(shape[:MAX_DIMS])} in bytes {begin} to {end} of {data_size:,}"
        raise DumpError(f"{path} is damaged: {printable(name)} is {what}", "copy it again")


def _whole_tensor(name: str, parts: list[Chunk], folder: Path) -> StoredTensor:
    """Return the tensor that chunks belong to, as large as they reach (DCP's reader does this)."""
    first = parts[0]
    if len(parts) == 1 and not any(first.offsets):
        return StoredTensor(name, first.sizes, first.dtype, (first,), folder)
    if len({len(chunk.sizes) for chunk in parts}) > 1:
        shapes = " and ".join(f"{list(chunk.sizes)} in {chunk.place.file}" for chunk in parts[:2] if chunk.place)
        raise DumpError(f"{folder}: {printable(name)} is {shapes}", "keep one of them")
    reach = [[at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in parts]
    shape = tuple(max(ends) for ends in zip(*reach, strict=True))
    return StoredTensor(name, shape, first.dtype, tuple(parts), folder)
