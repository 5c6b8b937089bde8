"""Which bytes of which files a part of a tensor is in: asked of a file's headers, no element is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.layout.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.checkpoint.formats.archive import Stored
    from shardviz.checkpoint.records import Chunk, Saved
    from shardviz.layout.region import Region


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of a file from the first element of a part to its last.

    Attributes:
        file: The file.
        start: The first byte.
        stop: One past the last.
        is_full: Whether the part has all of them; other elements lie between otherwise.
    """

    file: str
    start: int
    stop: int
    is_full: bool

    def __str__(self) -> str:
        return f"{'' if self.is_full else 'within '}bytes {self.start:,} to {self.stop:,}"


def extents(tensor: Saved, region: Region) -> Iterator[Extent]:
    """Yield where a part of a tensor lies, for each chunk that has any of it.

    Raises:
        DumpError: A file is missing, too short or damaged.
    """
    width = itemsize(tensor.dtype)
    for chunk in {(chunk.offsets, chunk.sizes): chunk for chunk in reversed(tensor.chunks)}.values():
        own = _own(chunk, region)
        if chunk.place is not None and all(own):
            yield _extent(chunk.place.file, tensor.stored(chunk), own, width)


def _own(chunk: Chunk, region: Region) -> list[list[tuple[int, int]]]:
    """Return what a chunk has of a part, counted from its own beginning, dim by dim."""
    cuts = []
    for ranges, start, size in zip(region.dims, chunk.offsets, chunk.sizes, strict=True):
        cut = [(max(begin - start, 0), min(end - start, size)) for begin, end in ranges]
        cuts.append([(low, high) for low, high in cut if low < high])
    return cuts


def _extent(file: str, stored: Stored, cuts: list[list[tuple[int, int]]], width: int) -> Extent:
    first = sum(min(low for low, _ in cut) * step for cut, step in zip(cuts, stored.strides, strict=True))
    last = sum((max(high for _, high in cut) - 1) * step for cut, step in zip(cuts, stored.strides, strict=True))
    size = math.prod(sum(high - low for low, high in cut) for cut in cuts)
    return Extent(file, stored.start + first * width, stored.start + (last + 1) * width, size == last - first + 1)
