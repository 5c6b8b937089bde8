"""A checkpoint's tensor for the drawing model: as a rank holds a part of a tensor, a file does, and has its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import DumpError
from shardviz.picture.model.by_layout import Laid
from shardviz.picture.model.holders import mask_of
from shardviz.picture.model.sides import Sides
from shardviz.text import natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.checkpoint.records import Checkpoint, Chunk, Saved
    from shardviz.layout.region import Region

MOST_DRAWN = 1 << 14
"""Chunks of a tensor that are drawn."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor in one piece.

    Attributes:
        region: Which part.
        file: The number of its file; None if no file has it.
        start: Its first byte there.
        size: How many bytes.
    """

    region: Region
    file: int | None
    start: int = 0
    size: int = 0

    @property
    def bytes(self) -> str:
        """Its bytes in the file."""
        return f"bytes {self.start:,} to {self.start + self.size:,}" if self.file is not None else "in no file"


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint, with all that a picture says of it.

    Attributes:
        tensor: The tensor.
        parts: Its chunks, in the checkpoint's order.
        files: The name of each file that has any of it, by number.
        sides: Which file holds what: the bits of `Sides.claimed` are files here.
    """

    tensor: Saved
    parts: tuple[StoredPart, ...]
    files: Mapping[int, str]
    sides: Sides


def numbered(checkpoint: Checkpoint) -> dict[str, int]:
    """Number a checkpoint's files, in the order of their names; a number is also a color."""
    return {name: at for at, name in enumerate(sorted(checkpoint.file_sizes, key=natural_key))}


def stored(tensor: Saved, numbers: Mapping[str, int]) -> Stored:
    """Describe a tensor.

    Args:
        tensor: One of the checkpoint's.
        numbers: What `numbered` gives for the checkpoint.

    Raises:
        DumpError: Its chunks are too many to draw, or reach out of it.
    """
    if len(tensor.chunks) > MOST_DRAWN:
        what = f"{printable(tensor.name)}: {len(tensor.chunks):,} chunks, more than {MOST_DRAWN:,} are not drawn"
        raise DumpError(what, "`shardviz show CHECKPOINT TENSOR --all` lists them")
    outside = next((chunk for chunk in tensor.chunks if not _is_inside(chunk, tensor)), None)
    if outside is not None:
        what = f"{printable(tensor.name)}: its chunk {outside.region} reaches out of {list(tensor.shape)}"
        raise DumpError(what, "`shardviz check CHECKPOINT` says which chunks do")
    parts = tuple(_part(chunk, numbers) for chunk in tensor.chunks)
    files = {numbers[name]: name for name in tensor.files}
    return Stored(tensor, parts, dict(sorted(files.items())), _sides(tensor, parts, len(numbers)))


def _is_inside(chunk: Chunk, tensor: Saved) -> bool:
    ends = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
    return all(start + size <= whole for start, size, whole in ends)


def _part(chunk: Chunk, numbers: Mapping[str, int]) -> StoredPart:
    place = chunk.place
    if place is None:
        return StoredPart(chunk.region, None)
    return StoredPart(chunk.region, numbers[place.file], place.start, place.size)


def _sides(tensor: Saved, parts: tuple[StoredPart, ...], num_files: int) -> Sides:
    """Lay out which file holds what, as `sides_of` does for ranks."""
    laid = Laid()
    for part in parts:
        if part.file is not None:
            laid.add(part.region, mask_of((part.file,)))
    return Sides(laid.holders(tensor.shape), num_files + 1, has_claimed=True, has_held=False)
