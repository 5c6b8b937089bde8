"""References on disk: complete checkpoints whose values show where they belong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.checkpoint.coverage import coverage_of
from shardviz.checkpoint.open import open_checkpoint
from shardviz.checkpoint.records import Entry
from shardviz.errors import DumpError
from shardviz.reference.names import matched
from shardviz.stamping.target import is_stamped
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.checkpoint.records import Checkpoint

__all__ = ["Entry", "Reference", "open_reference"]


@dataclass(frozen=True)
class Reference:
    """A checkpoint whose values show where a rank's values belong.

    Attributes:
        path: The file or folder.
        why: Why it lacks some of a model's tensors, by name, if that is known.
        is_stamped: Whether its values are of fills: what a stamped checkpoint has.
    """

    path: Path
    entries: Mapping[str, Entry]
    why: Mapping[str, str] = field(default_factory=dict)
    is_stamped: bool = False

    def find(self, name: str) -> Entry | None:
        """Return the tensor of this name; a wrapper's prefix that only one side has does not count."""
        known_as = matched([name], self.entries).names.get(name)
        return self.entries[known_as] if known_as is not None else None


def open_reference(path: Path | str) -> Reference:
    """Open a safetensors file or folder, or a DCP folder, as a reference; reads headers only.

    Raises:
        DumpError: There is no such file, or one is damaged: the message names the file and what was expected.

    Example:
        >>> open_reference("model.safetensors").entries["lm_head.weight"].shape  # doctest: +SKIP
        (32000, 4096)
    """
    found = complete_checkpoint(Path(path))
    return Reference(found.path, found.tensors, is_stamped=is_stamped(found.path))


def complete_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint that has each element of every tensor, once.

    Raises:
        DumpError: As `open_reference`.
    """
    checkpoint = open_checkpoint(path)
    _refuse_incomplete(checkpoint)
    for name, one in checkpoint.tensors.items():
        first: dict[tuple[int, ...], str] = {}
        for chunk in one.chunks:
            file = chunk.place.file if chunk.place else ""
            if chunk.offsets in first and 0 not in chunk.sizes:
                other = first[chunk.offsets]
                raise DumpError(f"{checkpoint.folder / file}: {printable(name)} is also in {other}", "keep one of them")
            first[chunk.offsets] = file
    return checkpoint


def _refuse_incomplete(checkpoint: Checkpoint) -> None:
    """Raise if files of the checkpoint are missing or too short, before any rank reads one."""
    missing = sorted(name for name, size in checkpoint.file_sizes.items() if size is None)
    if missing:
        by = "its index" if checkpoint.indexed else ".metadata"
        names = listed(map(printable, missing))
        raise DumpError(f"{checkpoint.path} lacks {names}, which {by} names", "copy the checkpoint again")
    for name, saved in checkpoint.tensors.items():
        coverage = coverage_of(saved)
        if (coverage is not None and coverage.missing) or any(chunk.place is None for chunk in saved.chunks):
            hint = f"`shardviz check {checkpoint.path}` says which; save it again"
            raise DumpError(f"{checkpoint.path} does not have all of {printable(name)}", hint)
        for chunk in saved.chunks:
            place = chunk.place
            end = checkpoint.file_sizes[place.file] if place else None
            if place and end is not None and place.start + place.size > end:
                what = f"{printable(name)} is in bytes {place.start:,} to {place.start + place.size:,}"
                raise DumpError(
                    f"{checkpoint.folder / place.file} ends at byte {end:,}: {what}", "copy the checkpoint again"
                )
