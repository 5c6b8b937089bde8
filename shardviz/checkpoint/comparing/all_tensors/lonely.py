"""Tensors that one checkpoint lacks: not in the file that should have them, masters saved as weights, lost states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.equality import is_same
from shardviz.checkpoint.comparing.outcome import KEPT, SIDES, Outcome, with_replaced
from shardviz.checkpoint.findings import copied_files
from shardviz.checkpoint.optimizer import state_of
from shardviz.explain.checkpoints.files import FileCopiedOver, StaleFileIndex, UnreadableFile
from shardviz.explain.checkpoints.states import StatelessParameters
from shardviz.groups import the_only
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.checkpoint.comparing.outcome import Outcomes, Verdict
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint

MASTERS = ("fp32", "fp32_param", "master_param", "param")


def lonely_outcomes(pairs: Sequence[Pair], checkpoints: tuple[Checkpoint, Checkpoint]) -> Outcomes:
    """Return the outcomes of tensors that one checkpoint lacks, or that are in a missing file of it."""
    copies = [copied_files(checkpoint) for checkpoint in checkpoints] if pairs else []
    outcomes = []
    for pair in pairs:
        at = pair.second is None
        file = checkpoints[at].indexed.get(pair.name, "")
        outcome = _of_file(pair, checkpoints[at], file, copies[at]) if file else lonely_outcome(pair, SIDES[not at])
        outcomes.append((outcome, pair))
    return outcomes


def _of_file(pair: Pair, checkpoint: Checkpoint, file: str, copies: Mapping[str, str]) -> Outcome:
    """Return the outcome of a tensor that is not in the file in which a checkpoint's index says that it is."""
    is_gone = checkpoint.file_sizes[file] is None
    twin = "" if is_gone else copies.get(file, "")
    has = "does not exist" if is_gone else f"has the tensors of {twin} instead" if twin else "does not have it"
    cause = FileCopiedOver(printable(file), printable(twin)) if twin else StaleFileIndex()
    why = f"{checkpoint.folder / file} {has}, and the index says that it is there"
    return Outcome(pair.name, "", "unreadable").became("unreadable", why, UnreadableFile() if is_gone else cause)


def lonely_outcome(pair: Pair, which: str) -> Outcome:
    """Return the outcome of a tensor that only one side has: `which` says which one."""
    verdict: Verdict = "missing" if pair.second is None else "added"
    more = f"; as the map says, {pair.lacking}" if pair.lacking else ""
    return Outcome(pair.name, "", verdict, f"only the {which} has it{more}")


def with_masters(outcomes: Outcomes) -> Outcomes:
    """Find masters that one side lacks and has as weights."""
    weights = {pair.name: pair for _, pair in outcomes if state_of(pair.name) is None}
    return [(_as_master(outcome, pair, weights), pair) for outcome, pair in outcomes]


def _as_master(outcome: Outcome, pair: Pair, weights: Mapping[str, Pair]) -> Outcome:
    """Say of a master that one side has whether the other has its values as the weight."""
    state, master = state_of(pair.name), pair.first or pair.second
    if master is None or state is None or state[1] not in MASTERS or outcome.verdict not in ("missing", "added"):
        return outcome
    at = int(pair.first is not None)
    of_owner = _weight_of(state[0], weights)
    weight = None if of_owner is None else of_owner.sides[at]
    if weight is None or weight.dtype != master.dtype or weight.shape != master.shape:
        return outcome
    side, name = SIDES[at], printable(weight.name)
    if is_same(master, weight):
        return outcome.became("tied", f"{outcome.why}: the {side} has it as its weight {name}", other=weight.name)
    return outcome.became(outcome.verdict, f"{outcome.why}; the {side}'s weight {name} has different values")


def _weight_of(parameter: str, weights: Mapping[str, Pair]) -> Pair | None:
    """Return the only weight that matches an optimizer's parameter name, or None."""
    return the_only([pair for name, pair in weights.items() if name == parameter or name.endswith(f".{parameter}")])


def with_lost_states(outcomes: Outcomes) -> Outcomes:
    """Explain that the second checkpoint lacks the state of some parameters but has others'."""
    states = [(outcome, pair, *state) for outcome, pair in outcomes if (state := state_of(pair.name)) is not None]
    lost = {parameter for outcome, _, parameter, _ in states if outcome.verdict == "missing"}
    kept = {
        parameter
        for outcome, pair, parameter, key in states
        if pair.second is not None or (outcome.verdict != "missing" and key not in MASTERS)
    }
    lost -= kept
    if not lost or not kept:
        return outcomes
    weights = {pair.name: pair for _, pair in outcomes if state_of(pair.name) is None}
    moved = {id(pair) for outcome, pair in outcomes if outcome.verdict not in KEPT}
    of_lost = {parameter: _weight_of(parameter, weights) for parameter in lost}
    lost = {name for name, weight in of_lost.items() if weight is None or weight.second is not None}
    cause = StatelessParameters(any(id(of_lost[name]) in moved for name in lost))
    words = f"the second has no state of {len(lost):,} of {len(lost | kept):,} parameters"
    without = [(one, pair) for one, pair, parameter, _ in states if one.verdict == "missing" and parameter in lost]
    explained = {id(pair): one.became("missing", f"{one.why}; {words}", cause) for one, pair in without}
    return with_replaced(outcomes, explained)
