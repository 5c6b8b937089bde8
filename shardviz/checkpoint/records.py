"""A checkpoint as data: tensors, their chunks, and the bytes of a file that hold a chunk.

An `Entry` is any tensor whose values are known: stored, made of others by a map, or filled by a stamp.
"""

from __future__ import annotations

import math
import mmap
import stat
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

from shardviz.checkpoint.formats.archive import FileTensor, find_tensor, strides_of
from shardviz.checkpoint.formats.pickle_reader import UnknownTypeError
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.files import MixedChunkTypes, ShardsOfTwoSaves, UnlistedChunk, UnreadableFile
from shardviz.layout.dtypes import itemsize
from shardviz.layout.region import Region
from shardviz.relate.values import part_of
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Kind

MAX_SIZE = 1 << 53
"""The largest number of a shape or of a place in a file that is believed."""


class Entry(Protocol):
    """A tensor with known values: stored, made from stored ones, or filled by a stamp."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """Its dtype, by torch's name."""

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers."""

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""


class Tensor(Entry, Protocol):
    """An entry with a name."""

    @property
    def name(self) -> str:
        """Its name."""


class DamagedFileError(DumpError):
    """A file of a checkpoint is missing, too short or damaged, or isn't what the checkpoint says.

    Args:
        message: What is wrong with one tensor in it.
        hint: What to do about it.
        file_text: What is wrong with the file, the same for all tensors in it.
        cause: Why.
    """

    def __init__(self, message: str, hint: str, file_text: str, cause: Cause) -> None:
        super().__init__(message, hint)
        self.file_text = file_text
        self.cause = cause


@dataclass(frozen=True)
class MemoryTensor:
    """A tensor whose values are in memory.

    Attributes:
        bits: They as unsigned integers.
    """

    name: str
    dtype: str
    bits: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        return tuple(self.bits.shape)

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""
        return part_of(self.bits, region)


class ByteRange(msgspec.Struct, frozen=True, gc=False):
    """The bytes of a file that hold a chunk.

    Attributes:
        file: The file's name in the checkpoint's folder.
        archive: Whether they are what `torch.save` wrote; the elements themselves otherwise.
        transformed: What the bytes went through after that, such as a compression; empty if through nothing.
    """

    file: str
    start: int
    size: int
    archive: bool = False
    transformed: str = ""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A part of a tensor that is stored in one piece.

    Attributes:
        offsets: Its first index in each dim.
        sizes: Its shape.
        place: Where it is stored; None if the checkpoint does not say.
        dtype: Its dtype where that is known without reading it, empty otherwise.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: ByteRange | None
    dtype: str = ""

    @property
    def region(self) -> Region:
        """The part of the tensor that it is."""
        ends = zip(self.offsets, self.sizes, strict=True)
        return Region(tuple(((start, start + size),) if size else () for start, size in ends))

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether it doesn't reach out of a tensor."""
        ends = zip(self.offsets, self.sizes, shape, strict=True)
        return all(start + size <= whole for start, size, whole in ends)


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a checkpoint, with its chunks.

    Attributes:
        chunks: The parts that it is stored in.
        folder: The folder of the files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    folder: Path

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it is in."""
        return tuple(dict.fromkeys(chunk.place.file for chunk in self.chunks if chunk.place))

    @property
    def distinct_chunks(self) -> Iterable[Chunk]:
        """The first of its chunks at each place, as a load reads them."""
        return {(chunk.offsets, chunk.sizes): chunk for chunk in reversed(self.chunks)}.values()

    @property
    def bits(self) -> NDArray[Any]:
        """Its bits as unsigned integers; mapped and read-only if it is stored in one piece."""
        return self.read(Region.whole(self.shape))

    def read(self, region: Region) -> NDArray[Any]:
        """Return the bits of a part, in the region's order; only its own bytes are read.

        Raises:
            DumpError: They are not stored, not once, or not readable.
        """
        kind = _bits_type(self.dtype, self.name)
        if not region.size:
            return np.empty(region.shape, kind)
        pieces = self._pieces(region)
        if len(pieces) == 1 and pieces[0][1].shape == region.shape:
            return pieces[0][1]
        stored = sum(piece.size for _, piece in pieces)
        if stored != region.size:
            raise DamagedFileError(
                f"{printable(self.name)}: {counted(stored, 'element')} stored for the {region.size:,} of {region}",
                f"`shardviz check {self.folder}` says which are missing, or there twice",
                f"the files of {self.folder} don't have each of its elements once",
                ShardsOfTwoSaves(is_twice=stored > region.size),
            )
        whole = np.empty(region.shape, kind)
        for into, piece in pieces:
            whole[into] = piece
        return whole

    def _pieces(self, region: Region) -> list[tuple[tuple[slice, ...], NDArray[Any]]]:
        """Return each chunk's overlap with a region, with its place in the region."""
        pieces = []
        for chunk in self.distinct_chunks:
            shared = _shared_boxes(region, chunk)
            bits = self.chunk_bits(chunk) if shared else np.empty(0)
            pieces += [(into, bits[own]) for into, own in shared]
        return pieces

    def chunk_bits(self, chunk: Chunk, mode: Literal["r", "r+"] = "r") -> NDArray[Any]:
        """Memory-map the bits of a chunk; with mode `r+`, writes go to the file.

        Raises:
            DumpError: They are not stored, or not as the checkpoint says.
        """
        stored = self.stored(chunk)
        kind = _bits_type(self.dtype, self.name)
        if stored.dtype != self.dtype or stored.shape != chunk.sizes:
            file = self.folder / chunk.place.file if chunk.place else self.folder
            raise DamagedFileError(
                f"{printable(self.name)}: its chunk at {list(chunk.offsets)} is {stored.dtype}{list(stored.shape)}, "
                f"the checkpoint says {self.dtype}{list(chunk.sizes)}",
                "save the checkpoint again",
                f"{file} has different dtypes or shapes than the checkpoint says",
                MixedChunkTypes(self.dtype),
            )
        if not math.prod(stored.shape):
            return np.empty(stored.shape, kind)
        assert chunk.place is not None, "what is stored has a place"
        last = sum((size - 1) * step for size, step in zip(stored.shape, stored.strides, strict=True))
        path, before = self.folder / chunk.place.file, stored.start % mmap.ALLOCATIONGRANULARITY
        access = mmap.ACCESS_READ if mode == "r" else mmap.ACCESS_WRITE
        try:  # np.memmap does this, too, but resolves the path and makes each slice a memmap
            with path.open("rb" if mode == "r" else "r+b", buffering=0) as opened:
                num_bytes = before + (1 + last) * kind.itemsize
                mapped = mmap.mmap(opened.fileno(), num_bytes, access=access, offset=stored.start - before)
        except OSError as error:
            raise DumpError(f"cannot read {path}: {error.strerror or error}", "copy the checkpoint again") from error
        steps = [step * kind.itemsize for step in stored.strides]
        bits: NDArray[Any] = np.ndarray(stored.shape, kind, mapped, before, steps)
        return bits

    def stored(self, chunk: Chunk) -> FileTensor:
        """Find out how a chunk is stored.

        Raises:
            DumpError: It is not, or its file is missing, too short or damaged.
        """
        place = chunk.place
        if place is None:
            lost = f"no file of {self.folder} has all of it"
            raise DamagedFileError(
                f"{printable(self.name)}: no file has {chunk.region}",
                "save the checkpoint again",
                lost,
                UnlistedChunk(),
            )
        path = self.folder / place.file
        if place.transformed:
            why = f"went through {printable(place.transformed)} after torch.save"
            raise DumpError(f"{path}: {printable(self.name)} {why}", "save without stream extensions to compare it")
        refuse_cut(self.folder, place, self.name)
        if place.archive:
            return self._find_in(path, place)
        return FileTensor(chunk.dtype or self.dtype, chunk.sizes, strides_of(chunk.sizes), place.start)

    def _find_in(self, path: Path, place: ByteRange) -> FileTensor:
        """Find the chunk that torch.save wrote at a place of a file."""
        try:
            return find_tensor(path, place.start, place.size, self.name)
        except UnknownTypeError:
            raise
        except DumpError as error:
            has = "is damaged, or is not the file that the checkpoint describes"
            raise DamagedFileError(error.message, error.hint, f"{path} {has}", UnreadableFile(is_whole=True)) from error


@dataclass(frozen=True, slots=True)
class Problem:
    """An error that a reader found in a checkpoint while laying out its files.

    Attributes:
        name: The tensor that it is about; empty for the checkpoint.
        explanation: The most likely cause; None for what cannot be read, which is a note and not a finding.
        kind: The kind of the finding, if it is not the usual one of its cause.
    """

    name: str
    text: str
    explanation: Cause | None = None
    kind: Kind | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, of which only headers and metadata were read.

    Attributes:
        kind: Which format it is in: `DCP`, `safetensors`.
        objects: What else it has, such as an optimizer's settings, by name.
        values: Such objects that were read together with its headers.
        indexed: The file that an index names for each tensor; empty without an index.
        tied: Whether its own settings say that input and output embeddings are one tensor.
        problems: What was found wrong while its files were laid out.
        sizes: The bytes of files, as far as its reader has looked.
        unread: Files beside those that were read, such as an optimizer's, that may be part of it.
        ranks: The files or folders of all ranks, if it is the part of one rank; empty otherwise.
        second_set: The file of all weights next to an index, which loaders read before the index; empty without one.
    """

    path: Path
    kind: str
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, ByteRange] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    indexed: Mapping[str, str] = field(default_factory=dict)
    tied: bool = False
    problems: tuple[Problem, ...] = ()
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    second_set: str = ""

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of its tensors, and of those that its index says are in files that are missing."""
        return frozenset({*self.tensors, *self.indexed})

    @cached_property
    def file_sizes(self) -> Mapping[str, int | None]:
        """The bytes of each file that a chunk is in or an index names; None if it is missing."""
        names = dict.fromkeys(file for one in self.tensors.values() for file in one.files)
        names |= dict.fromkeys([*(place.file for place in self.objects.values()), *self.indexed.values()])
        sizes, folder = self.sizes, self.folder
        return {name: sizes[name] if name in sizes else file_size(folder / name) for name in names}


def file_size(path: Path) -> int | None:
    """Return the bytes of a file; None if it is missing, or isn't a regular file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def refuse_cut(folder: Path, place: ByteRange, name: str) -> None:
    """Refuse a place of a file that is missing, or ends before it.

    Raises:
        DamagedFileError: It is one of these.
    """
    path, stop = folder / place.file, place.start + place.size
    end = file_size(path)
    if end is not None and stop <= end:
        return
    has = "does not exist" if end is None else f"ends at byte {end:,}"
    raise DamagedFileError(
        f"{path} {has}: {printable(name)} is in bytes {place.start:,} to {stop:,}",
        "copy the checkpoint again",
        f"{path} {has}{'' if end is None else ', before the end of what was saved in it'}",
        UnreadableFile(),
    )


def _bits_type(dtype: str, name: str) -> np.dtype[Any]:
    width = itemsize(dtype)
    if width not in (1, 2, 4, 8):
        raise DumpError(f"{printable(name)}: elements of type {printable(dtype)} cannot be read", "cast it before")
    return np.dtype(f"<u{width}")


def _shared_boxes(region: Region, chunk: Chunk) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return the boxes shared by a region and a chunk, as slices of each."""
    boxes: list[tuple[tuple[slice, ...], tuple[slice, ...]]] = [((), ())]
    for ranges, start, size in zip(region.dims, chunk.offsets, chunk.sizes, strict=True):
        along, before = [], 0
        for begin, end in ranges:
            low, high = max(begin, start), min(end, start + size)
            if low < high:
                along.append((slice(before + low - begin, before + high - begin), slice(low - start, high - start)))
            before += end - begin
        boxes = [((*into, one), (*own, other)) for into, own in boxes for one, other in along]
    return boxes


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a file from a part's first element to its last.

    Attributes:
        stop: One past the last.
        is_full: Whether the part has all of them; other elements lie between otherwise.
    """

    file: str
    start: int
    stop: int
    is_full: bool

    def __str__(self) -> str:
        return f"{'' if self.is_full else 'within '}bytes {self.start:,} to {self.stop:,}"


def extents(tensor: StoredTensor, region: Region) -> Iterator[Extent]:
    """Yield where a part of a tensor lies, for each chunk that has any of it.

    Raises:
        DumpError: A file is missing, too short or damaged.
    """
    width = itemsize(tensor.dtype)
    for chunk in tensor.distinct_chunks:
        overlap = _overlap(chunk, region)
        if chunk.place is not None and all(overlap):
            yield _extent(chunk.place.file, tensor.stored(chunk), overlap, width)


def _overlap(chunk: Chunk, region: Region) -> list[list[tuple[int, int]]]:
    """Return a chunk's overlap with a part, counted from the chunk's start, dim by dim."""
    cuts = []
    for ranges, start, size in zip(region.dims, chunk.offsets, chunk.sizes, strict=True):
        cut = [(max(begin - start, 0), min(end - start, size)) for begin, end in ranges]
        cuts.append([(low, high) for low, high in cut if low < high])
    return cuts


def _extent(file: str, stored: FileTensor, cuts: list[list[tuple[int, int]]], width: int) -> Extent:
    first = sum(min(low for low, _ in cut) * step for cut, step in zip(cuts, stored.strides, strict=True))
    last = sum((max(high for _, high in cut) - 1) * step for cut, step in zip(cuts, stored.strides, strict=True))
    size = math.prod(sum(high - low for low, high in cut) for cut in cuts)
    return Extent(file, stored.start + first * width, stored.start + (last + 1) * width, size == last - first + 1)
