"""What a save wrote, read back offline: a load that undoes the mistakes of its save would hide both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.orders import name_change
from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.checkpoint.optimizer import state_of
from shardviz.errors import DumpError, ShardvizError
from shardviz.explain.transfers import WrongOnDisk
from shardviz.layout.region import Region, index_of
from shardviz.reference.names import matched
from shardviz.relate.casts import cast
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Saved
    from shardviz.explain.finding import Finding
    from shardviz.reference.files import Entry

MOST = 3


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints that a save wrote: the folder itself, or what is in it."""
    if is_checkpoint(folder):
        return [folder]
    return [one for one in sorted(folder.iterdir()) if is_checkpoint(one)] if folder.is_dir() else []


def saved_in(folder: Path) -> tuple[dict[str, Saved], list[str]]:
    """Return the tensors on disk by name, and why some files were not read."""
    tensors: dict[str, Saved] = {}
    refused = []
    for path in checkpoints_in(folder):
        try:
            tensors |= open_checkpoint(path).tensors
        except DumpError as error:
            refused.append(error.message.replace(f"{folder}/", "").replace(str(folder), "the folder"))
    return tensors, refused


def check_disk(
    sent: Mapping[str, Entry], stored: Mapping[str, Saved], trips: str
) -> tuple[list[Finding], dict[str, str]]:
    """Compare what is on disk with what was saved, each tensor under its own name.

    Args:
        sent: What was saved, by name; optimizer state as `up.weight exp_avg`.
        stored: What is on disk.
        trips: On which mesh it was saved, in words.

    Returns:
        What is wrong, and the tensors that were not found, with why.
    """
    wrong, absent = [], {}
    names = names_on_disk(list(sent), stored)
    for name, entry in sent.items():
        if name not in names:
            absent[name] = "nothing on disk has its name"
            continue
        try:
            text = _difference(entry, stored[names[name]])
        except (DumpError, ShardvizError, OSError) as error:
            absent[name] = str(error).partition("\n")[0]
            continue
        if text:
            wrong.append(_finding(name, stored[names[name]], text, trips, sent))
    return wrong, absent


def names_on_disk(names: list[str], stored: Mapping[str, Saved]) -> dict[str, str]:
    """Return what tensors and optimizer states are called on disk."""
    states = {state: name for name in stored if (state := state_of(name)) is not None}
    weights = [name for name in stored if state_of(name) is None]
    known = dict(matched([name for name in names if " " not in name], weights).names)
    owners = matched([name.partition(" ")[0] for name in names if " " in name], {owner for owner, _ in states}).names
    for name in names:
        owner, _, key = name.partition(" ")
        if key and (owners.get(owner, owner), key) in states:
            known[name] = states[owners.get(owner, owner), key]
    return known


def _difference(entry: Entry, saved: Saved) -> str:
    """Say how a tensor on disk differs from what was saved; empty if it does not."""
    if tuple(entry.shape) != tuple(saved.shape):
        return f"it has shape {list(saved.shape)}, the model's has {list(entry.shape)}"
    wanted = cast(entry.bits, entry.dtype, saved.dtype)
    if wanted is None:
        raise ShardvizError(f"it is {saved.dtype} on disk")
    on_disk = saved.read(Region.whole(saved.shape))
    if np.array_equal(wanted, on_disk):
        return ""
    change = name_change(wanted, on_disk, (saved, saved))
    return change or _first(wanted, on_disk, saved)


def _first(wanted: NDArray[Any], on_disk: NDArray[Any], saved: Saved) -> str:
    wrong = np.flatnonzero((wanted != on_disk).reshape(-1))
    files = {
        chunk.place.file
        for chunk in saved.chunks
        if chunk.place and (wanted[_slices(chunk.region)] != on_disk[_slices(chunk.region)]).any()
    }
    at = index_of(int(wrong[0]), saved.shape)
    return f"{len(wrong):,} of {wanted.size:,} elements are wrong, the first at {at}, in {listed(sorted(files), MOST)}"


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*ranges[0]) if ranges else slice(0, 0) for ranges in region.dims)


def _finding(name: str, saved: Saved, text: str, trips: str, sent: Mapping[str, Entry]) -> Finding:
    whose = _owner(saved, sent)
    text = f"it has the values of {whose}" if whose and whose != name else text
    return WrongOnDisk().finding(
        name,
        (),
        f"on disk{'' if saved.name == name else f', as {saved.name}'}, {text}",
        kind="foreign" if whose else "misordered" if "elements are wrong" not in text else "wrong-value",
        details=(trips,),
    )


def _owner(saved: Saved, sent: Mapping[str, Entry]) -> str:
    """Return the tensor whose values it has; empty if it has those of none."""
    bits = saved.read(Region.whole(saved.shape))
    for name, entry in sent.items():
        if tuple(entry.shape) == tuple(saved.shape) and entry.dtype == saved.dtype and np.array_equal(entry.bits, bits):
            return name
    return ""


def not_checked_text(absent: Mapping[str, str], refused: list[str], total: int) -> Iterator[str]:
    """Yield what was not looked at on disk."""
    if refused:
        yield f"what is on disk: {refused[0]}"
    elif len(absent) == total:
        yield "what is on disk: no name there is the model's; pass names={...}"
    elif absent:
        yield f"{counted(len(absent), 'tensor')} on disk: {listed(absent, MOST)}: {next(iter(absent.values()))}"
