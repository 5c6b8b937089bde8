"""References on disk: safetensors files and folders of them, mapped into memory and never unpickled.

Element types that numpy lacks (bfloat16, float8) are no obstacle, since only bits are compared.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardviz.errors import DumpError
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""Bytes of a header: safetensors itself refuses a longer one."""

INDEX = "model.safetensors.index.json"

DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}
"""How safetensors names element types, and how torch does."""

WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Attributes:
        path: The file.
        dtype: Its element type, as torch writes it.
        shape: Its shape.
        start: Its first byte in the file.
        width: Bytes of an element.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    width: int

    @property
    def bits(self) -> NDArray[Any]:
        """Its bits as unsigned integers, mapped and read-only."""
        kind = f"<u{self.width}"
        if not math.prod(self.shape):
            return np.empty(self.shape, kind)
        return np.memmap(self.path, kind, "r", self.start, self.shape or (1,)).reshape(self.shape)


@dataclass(frozen=True)
class Reference:
    """What values are compared with.

    Attributes:
        path: The file or folder.
        entries: Its tensors by name.
        why: Why it lacks some of a model's tensors, by name, where that is known.
    """

    path: Path
    entries: Mapping[str, Entry]
    why: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Entry | None:
        """Return the tensor of this name; a wrapper's prefix that only one side has does not count."""
        if name in self.entries:
            return self.entries[name]
        return self._by_suffix.get(name) or next(
            (self.entries[short] for short in _shortened(name) if short in self.entries), None
        )

    @cached_property
    def _by_suffix(self) -> dict[str, Entry]:
        """Tensors by their names without a wrapper's prefix, where only one tensor has that shorter name."""
        found: dict[str, list[Entry]] = {}
        for name, entry in self.entries.items():
            for short in _shortened(name):
                found.setdefault(short, []).append(entry)
        return {name: entries[0] for name, entries in found.items() if len(entries) == 1}


WRAPPERS = ("module.", "model.", "_orig_mod.", "base_model.model.")
"""What libraries put before every name."""


def _shortened(name: str) -> Iterator[str]:
    for wrapper in WRAPPERS:
        if name.startswith(wrapper):
            yield name.removeprefix(wrapper)


def open_reference(path: Path | str) -> Reference:
    """Open a safetensors file, or a folder of them with or without an index; only headers are read.

    Raises:
        DumpError: There is no such file, or one is damaged: the message names the file and what was expected.

    Example:
        >>> open_reference("model.safetensors").entries["lm_head.weight"].shape  # doctest: +SKIP
        (32000, 4096)
    """
    path = Path(path)
    if path.is_dir():
        files = _indexed(path) or sorted(path.glob("*.safetensors"))
        if not files:
            raise DumpError(
                f"{path} has no .safetensors file", "give a safetensors file, or the folder of a checkpoint"
            )
    else:
        files = [path]
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in _entries(file):
            if name in entries:
                raise DumpError(f"{file}: {printable(name)} is also in {entries[name].path.name}", "keep one of them")
            entries[name] = entry
    return Reference(path, entries)


def _indexed(folder: Path) -> list[Path]:
    """Return the files that a Hugging Face index names; empty where there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except (OSError, msgspec.DecodeError) as error:
        raise DumpError(f"{index} is damaged: {printable(str(error))}", "copy it again") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise DumpError(
            f"{index} names a file outside its folder: {printable(outside[0])}", "copy the checkpoint again"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DumpError(f"{folder} lacks {listed(missing, 3)}, which its index names", "copy the checkpoint again")
    return [folder / name for name in names]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Header(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _entries(path: Path) -> Iterator[tuple[str, Entry]]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 2 <= length <= min(MAX_HEADER, size - LENGTH_BYTES):
                raise DumpError(f"{path} is not a safetensors file", "give a safetensors file, or a folder of them")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            found = {name: msgspec.json.decode(raw, type=_Header) for name, raw in header.items()}
    except FileNotFoundError as error:
        raise DumpError(f"{path} does not exist", "give a safetensors file, or a folder of them") from error
    except (OSError, msgspec.DecodeError) as error:
        raise DumpError(f"{path} is damaged: {printable(str(error))}", "copy it again") from error
    for name, one in found.items():
        begin, end = one.data_offsets
        width = WIDTHS.get(one.dtype, 1)
        first = LENGTH_BYTES + length
        if (
            min(one.shape, default=0) < 0
            or begin < 0
            or end - begin != math.prod(one.shape) * width
            or first + end > size
        ):
            raise DumpError(
                f"{path} is damaged: {printable(name)} is {one.dtype}{list(one.shape)} in bytes {begin} to {end} of "
                f"{size - first:,}",
                "copy it again",
            )
        yield name, Entry(path, DTYPES.get(one.dtype, one.dtype.lower()), one.shape, first + begin, width)
