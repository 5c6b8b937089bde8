"""Checkpoints read back offline: a load could hide the mistakes of its save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.all_tensors.odd_files import files_of
from shardviz.checkpoint.comparing.equality import ContentIndex, agree, can_cast
from shardviz.checkpoint.comparing.one_tensor.changes import change_of
from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.checkpoint.optimizer import state_of
from shardviz.errors import DumpError, ShardvizError
from shardviz.explain.testing.transfers import WrongOnDisk
from shardviz.reference.names import matched
from shardviz.testing.trips.pieces import SourceTensor
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shardviz.checkpoint.records import StoredTensor
    from shardviz.explain.finding import Finding, Kind
    from shardviz.reference.files import Entry


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints that a save wrote: the folder itself, or those in it."""
    if is_checkpoint(folder):
        return [folder]
    return [one for one in sorted(folder.iterdir()) if is_checkpoint(one)] if folder.is_dir() else []


def saved_in(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors on disk by name, and why some files were not read."""
    tensors: dict[str, StoredTensor] = {}
    refused = []
    for path in checkpoints_in(folder):
        try:
            tensors |= open_checkpoint(path).tensors
        except DumpError as error:
            refused.append(error.message.replace(f"{folder}/", "").replace(str(folder), "the folder"))
    return tensors, refused


def check_disk(
    sent: Mapping[str, Entry], stored: Mapping[str, StoredTensor], trips: str
) -> tuple[list[Finding], dict[str, str]]:
    """Compare the tensors on disk with those saved, each under its own name.

    Args:
        sent: What was saved, by name; optimizer state as `up.weight exp_avg`.
        stored: What is on disk.
        trips: On which mesh it was saved, in words.

    Returns:
        What is wrong, and the tensors that were not found, with why.
    """
    wrong, absent = [], {}
    names = names_on_disk(list(sent), stored)
    saved_contents = ContentIndex.of(SourceTensor(name, entry) for name, entry in sent.items())
    for name, saved_entry in sent.items():
        if name not in names:
            absent[name] = "nothing on disk has its name"
            continue
        try:
            finding = _finding(SourceTensor(name, saved_entry), stored[names[name]], saved_contents, trips)
        except (ShardvizError, OSError) as error:
            absent[name] = str(error).partition("\n")[0]
            continue
        if finding is not None:
            wrong.append(finding)
    return wrong, absent


def names_on_disk(names: list[str], stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return what tensors and optimizer states are called on disk."""
    states = {state: name for name in stored if (state := state_of(name)) is not None}
    weights = [name for name in stored if state_of(name) is None]
    names_stored = dict(matched([name for name in names if " " not in name], weights).names)
    owners = matched([name.partition(" ")[0] for name in names if " " in name], {owner for owner, _ in states}).names
    for name in names:
        owner, _, key = name.partition(" ")
        if key and (owners.get(owner, owner), key) in states:
            names_stored[name] = states[owners.get(owner, owner), key]
    return names_stored


def _finding(sent: SourceTensor, saved: StoredTensor, contents: ContentIndex, trips: str) -> Finding | None:
    """Return how a tensor on disk differs from what was saved; None if it does not."""
    if not can_cast(sent.dtype, saved.dtype):
        raise ShardvizError(f"it is {saved.dtype} on disk")
    if agree(sent, saved):
        return None
    called = "on disk" if saved.name == sent.name else f"on disk, as {saved.name}"
    if whose := next((one.name for one in contents.equal_to(saved)), ""):
        sentence = f"{called}, it has the values of {whose}"
        return WrongOnDisk().finding(sent.name, (), sentence, kind="foreign", details=(trips,))
    outcome = change_of(Outcome(sent.name, saved.name, "equal"), sent, saved, ("what was saved", "it"))
    files = f", in {listed(sorted(files_of(saved, sent)[1]))}" if outcome.verdict == "other" else ""
    kind: Kind = "misordered" if outcome.verdict == "permuted" else "wrong-value"
    return WrongOnDisk().finding(sent.name, (), f"{called}, {outcome.why}{files}", kind=kind, details=(trips,))


def not_checked_text(absent: Mapping[str, str], refused: list[str], total: int) -> Iterator[str]:
    """Yield what was not looked at on disk."""
    if refused:
        yield f"what is on disk: {refused[0]}"
    elif len(absent) == total:
        yield "what is on disk: no name there is the model's; pass names={...}"
    elif absent:
        yield f"{counted(len(absent), 'tensor')} on disk: {listed(absent)}: {next(iter(absent.values()))}"
