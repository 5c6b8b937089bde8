"""Stamped DCP folders: every file is copied, and fills are written where the elements of each chunk stand.

So the copy has the chunks, the objects and the metadata of the original, bit by bit, which no save by torch would give.
Torch is not needed, nothing is unpickled, and one chunk is in memory at a time.
"""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.reference.files import complete_checkpoint
from shardviz.stamping.plan import Plan, equal_ones, plan
from shardviz.stamping.target import MARK_FILE, STAMPED, replaced
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardviz.checkpoint.records import Chunk, Saved
    from shardviz.stamping.fill import Fill


def stamp_dcp(source: Path, target: Path, *, force: bool = False, salt: str = "") -> Plan:
    """Write the stamped copy of a folder that torch.distributed.checkpoint wrote.

    Args:
        source: The folder.
        target: The copy.
        force: Replace what is there, if it is a stamped copy.
        salt: As for `Fill`.

    Raises:
        DumpError: The source is not a checkpoint, or is damaged, or the copy cannot be written.
    """
    entries = complete_checkpoint(source).tensors
    tensors = {name: (saved.dtype, saved.shape) for name, saved in entries.items()}
    made = plan(tensors, equal_ones(entries), str(source), salt)
    names = _files(source, entries.values())
    nbytes = sum((source / name).stat().st_size for name in names)
    with replaced(target, nbytes, is_folder=True, force=force) as unfinished:
        for name in names:
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, unfinished / name)
        for name, fill in made.fills.items():
            for chunk in entries[name].chunks:
                _write(unfinished, entries[name], chunk, fill)
        (unfinished / MARK_FILE).write_text(f"{STAMPED}\n")
    return made


def _files(source: Path, entries: Iterable[Saved]) -> list[str]:
    """Return the names of a folder's files: those that tensors are in, and what stands beside them."""
    root = source.resolve()
    beside = [path.name for path in source.iterdir() if path.is_file() and path.resolve().parent == root]
    names = sorted({*beside, *(name for saved in entries for name in saved.files)})
    outside = [name for name in names if root not in (source / name).resolve().parents]
    if outside:
        raise DumpError(
            f"{source}: {printable(outside[0])} leads out of the folder", "copy the checkpoint without links"
        )
    return names


def _write(folder: Path, saved: Saved, chunk: Chunk, fill: Fill) -> None:
    """Write a chunk's part of a fill over its elements."""
    if not math.prod(chunk.sizes):
        return
    stored = saved.stored(chunk)
    if stored.dtype != saved.dtype or stored.shape != chunk.sizes:
        raise DumpError(
            f"{printable(saved.name)}: its chunk at {list(chunk.offsets)} is {stored.dtype}{list(stored.shape)}, the "
            f"checkpoint says {saved.dtype}{list(chunk.sizes)}",
            "save the checkpoint again",
        )
    assert chunk.place is not None, "what is stored has a place"
    width = itemsize(saved.dtype)
    last = sum((size - 1) * step for size, step in zip(stored.shape, stored.strides, strict=True))
    flat = np.memmap(folder / chunk.place.file, f"<u{width}", "r+", stored.start, (1 + last,))
    steps = tuple(step * width for step in stored.strides)
    np.lib.stride_tricks.as_strided(flat, stored.shape, steps)[...] = fill.read(chunk.region)
    flat.flush()
