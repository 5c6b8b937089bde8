"""Rules for what is saved besides ranks' tensors: steps, hyperparameters, ties, the optimizer, and the files on disk.

Checkpoints are read back offline: a load could hide the mistakes of its save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed

from shardviz.checkpoint.comparing.all_tensors.odd_files import files_of
from shardviz.checkpoint.comparing.equality import ContentIndex, agree, can_cast
from shardviz.checkpoint.comparing.one_tensor.changes import change_of
from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.checkpoint.optimizer import state_of
from shardviz.errors import DumpError, ShardvizError
from shardviz.explain.checkpoints.states import (
    NameLostInLoad,
    SettingLostInLoad,
    StateLostInLoad,
    ThawedByLoad,
    TieLostInLoad,
)
from shardviz.explain.step.update import OptimizerOfOtherParameters
from shardviz.explain.testing.transfers import StateByNumber, WrongOnDisk
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.reference.names import matched
from shardviz.relate.tolerance import SINGLE
from shardviz.testing.trips.pieces import SourceTensor
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from shardviz.checkpoint.records import StoredTensor
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding, Kind
    from shardviz.reference.files import Entry
    from shardviz.testing.trips.contents import RankContents


@dataclass(frozen=True)
class OtherState:
    """Saved state of all ranks, besides tensors.

    Attributes:
        states: The names of all state tensors and numbers: `up.weight exp_avg`, `up.weight step`.
        numbers: The numbers among them.
        settings: Hyperparameters by name: `up.weight lr`.
    """

    states: Collection[str]
    numbers: Mapping[str, float]
    settings: Mapping[str, float]


def facts_of(contents: RankContents) -> OtherState:
    """Return all ranks' state besides tensors. Every rank of the world calls this."""
    states = [name for name, local in contents.tensors.items() if local.role == "optim"] + list(contents.numbers)
    numbers = {name: one.value for name, one in contents.numbers.items()}
    of_all = of_all_ranks((states, numbers, contents.settings))
    return OtherState(
        tuple(dict.fromkeys(name for one in of_all for name in one[0])),
        {name: value for one in of_all for name, value in one[1].items()},
        {name: value for one in of_all for name, value in one[2].items()},
    )


def check_states(
    saved: OtherState, before: RankContents, after: RankContents, of: Collection[str], trips: str
) -> Iterator[Finding]:
    """Yield what a load did not bring, or broke. Every rank of the world calls this.

    Args:
        trips: Where it was saved and loaded, in words.
    """
    wrong = _lost_state(before, after) | _strangers(before, after)
    if "optim" in of:
        numbers = {name: one.value for name, one in after.numbers.items()}
        wrong |= _missing(saved, after) | _changed("number", saved.numbers, numbers)
    if "setting" in of:
        wrong |= _changed("setting", saved.settings, after.settings, SINGLE)
    wrong |= _untied_names(before, after) | _thawed(before, after)
    ranks_of: dict[tuple[str, str, str], list[int]] = {}
    for rank, of_rank in enumerate(of_all_ranks(wrong)):
        for name, (kind, text) in of_rank.items():
            ranks_of.setdefault((name, kind, text), []).append(rank)
    size = distributed.get_world_size()
    for (name, kind, text), ranks in ranks_of.items():
        sentence = f"{text}, on {len(ranks):,} of {size:,} ranks"
        yield CAUSES[kind].finding(name, tuple(ranks), sentence, details=(trips,))


CAUSES: Mapping[str, Cause] = {
    "state": StateLostInLoad(),
    "extra": StateByNumber(),
    "number": SettingLostInLoad(is_step=True),
    "setting": SettingLostInLoad(is_step=False),
    "tie": TieLostInLoad(),
    "stranger": OptimizerOfOtherParameters("load"),
    "name": NameLostInLoad(),
    "frozen": ThawedByLoad(),
}
"""The cause of each thing that a load did not bring, or broke."""


def _thawed(before: RankContents, after: RankContents) -> dict[str, tuple[str, str]]:
    """Return the parameters that a load froze or unfroze."""
    odd = [name for name in before.frozen ^ after.frozen if name in before.tensors and name in after.tensors]
    words = {True: "it was frozen before the load, and is not now", False: "it is frozen after the load, and was not"}
    return {name: ("frozen", words[name in before.frozen]) for name in odd}


def _lost_state(before: RankContents, after: RankContents) -> dict[str, tuple[str, str]]:
    gone = before.tensors.keys() - after.tensors.keys() - after.not_known.keys()
    weights = [name for name in gone if before.tensors[name].role != "optim"]
    return dict.fromkeys(weights, ("name", "the model has no such tensor after the load"))


def _missing(saved: OtherState, after: RankContents) -> dict[str, tuple[str, str]]:
    have = [name for name, local in after.tensors.items() if local.role == "optim"] + list(after.numbers)
    owners, state_keys = _owners(after), {name.partition(" ")[2] for name in saved.states}
    wrong = {}
    for name in saved.states:
        if name.partition(" ")[0] in owners and name not in have:
            wrong[name] = "state", "the optimizer has no such state after the load"
    for name in have:
        owner, _, key = name.partition(" ")
        if name not in saved.states and key in state_keys and f"{owner} " in " ".join((*saved.settings, "")):
            wrong[name] = "extra", "the optimizer has such a state after the load, and had none when it was saved"
    return wrong


def _owners(contents: RankContents) -> set[str]:
    """Return the stepped parameters with elements on this rank; empty shards need no state."""
    owners = {name.partition(" ")[0] for name in contents.settings}
    return {name for name in owners if name not in contents.tensors or contents.tensors[name].values.numel()}


def _changed(
    kind: str, saved: Mapping[str, float], after: Mapping[str, float], near: float = 0.0
) -> dict[str, tuple[str, str]]:
    return {
        name: (kind, f"it is {after[name]:g} after the load, and was saved as {value:g}")
        for name, value in saved.items()
        if name in after and not math.isclose(after[name], value, rel_tol=near)
    }


def _untied_names(before: RankContents, after: RankContents) -> dict[str, tuple[str, str]]:
    group_of = {name: group for group in after.tied for name in group}
    return {
        name: ("tie", f"it shared storage with {group[0]} before the load, and does not now")
        for group in before.tied
        for name in group[1:]
        if name in after.tensors and group[0] in after.tensors and name not in group_of.get(group[0], ())
    }


def _strangers(before: RankContents, after: RankContents) -> dict[str, tuple[str, str]]:
    if after.strangers <= before.strangers:
        return {}
    more = after.strangers - before.strangers
    name = next((one.partition(" ")[0] for one in after.settings if one.startswith("param_groups[")), "")
    return {name: ("stranger", f"the optimizer steps {more} tensors that no longer belong to the model")}


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
