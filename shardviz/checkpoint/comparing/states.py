"""Missing optimizer state: master weights saved as weights, and parameters without state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.equality import is_same
from shardviz.checkpoint.comparing.outcome import SIDES
from shardviz.checkpoint.optimizer import state_of
from shardviz.explain.checkpoints.states import StatelessParameters
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair

    Outcomes = list[tuple[Outcome, Pair]]

MASTERS = ("fp32", "fp32_param", "master_param", "param")
UNCHANGED = ("equal", "cast")


def with_masters(outcomes: Outcomes) -> Outcomes:
    """Find masters that one side lacks and has as weights."""
    weights = {pair.name: pair for _, pair in outcomes if state_of(pair.name) is None}
    return [(_as_master(outcome, pair, weights, _owner((outcome, pair))), pair) for outcome, pair in outcomes]


def _owner(judged_pair: tuple[Outcome, Pair]) -> str:
    """Return the parameter of a master that one side has; empty for other tensors."""
    outcome, pair = judged_pair
    state = state_of(pair.name) if outcome.verdict in ("missing", "added") else None
    return state[0] if state is not None and state[1] in MASTERS else ""


def _as_master(outcome: Outcome, pair: Pair, weights: Mapping[str, Pair], owner: str) -> Outcome:
    master = pair.first or pair.second
    of_owner = _weight_of(owner, weights) if owner else None
    if of_owner is None or master is None:
        return outcome
    at = int(pair.first is not None)
    weight = of_owner.sides[at]
    if weight is None or weight.dtype != master.dtype or weight.shape != master.shape:
        return outcome
    side, name = SIDES[at], printable(weight.name)
    if is_same(master, weight):
        return outcome.became("tied", f"{outcome.why}: the {side} has it as its weight {name}", other=weight.name)
    return outcome.became(outcome.verdict, f"{outcome.why}; the {side}'s weight {name} has different values")


def _weight_of(parameter: str, weights: Mapping[str, Pair]) -> Pair | None:
    """Return the only weight that matches an optimizer's parameter name, or None."""
    fits = [pair for name, pair in weights.items() if name == parameter or name.endswith(f".{parameter}")]
    return fits[0] if len(fits) == 1 else None


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
    moved = {id(pair) for outcome, pair in outcomes if outcome.verdict not in UNCHANGED}
    of_lost = {parameter: _weight_of(parameter, weights) for parameter in lost}
    lost = {name for name, weight in of_lost.items() if weight is None or weight.second is not None}
    cause = StatelessParameters(any(id(of_lost[name]) in moved for name in lost))
    words = f"the second has no state of {len(lost):,} of {len(lost | kept):,} parameters"
    without = {id(pair) for outcome, pair, parameter, _ in states if outcome.verdict == "missing" and parameter in lost}
    return [
        (outcome.became("missing", f"{outcome.why}; {words}", cause) if id(pair) in without else outcome, pair)
        for outcome, pair in outcomes
    ]
