"""Rules for loaded states besides tensors: steps, hyperparameters, ties, the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed

from shardviz.explain.checkpoints.states import (
    NameLostInLoad,
    SettingLostInLoad,
    StateLostInLoad,
    ThawedByLoad,
    TieLostInLoad,
)
from shardviz.explain.step.update import OptimizerOfOtherParameters
from shardviz.explain.testing.transfers import StateByNumber
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.relate.tolerance import SINGLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
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
        saved: What was saved.
        before: What this rank had before the load.
        after: What it has now.
        of: What to compare.
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
