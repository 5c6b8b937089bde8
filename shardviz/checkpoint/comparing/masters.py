"""Master copies that only one checkpoint has by that name: the other's weights, where those are in their element type.

Under stage 3 DeepSpeed's weights are the masters; under stages 1 and 2 the module is rounded, with the masters beside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.agreement import is_same
from shardviz.checkpoint.optimizer import state_of
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair

    Found = list[tuple[Outcome, Pair]]

MASTERS = ("fp32", "fp32_param", "master_param", "param")
SIDES = ("first", "second")


def with_masters(found: Found) -> Found:
    """Find masters that one side lacks and has as weights."""
    if not any(map(_owner, found)):
        return found
    weights = {pair.name: pair for _, pair in found if state_of(pair.name) is None}
    return [(_judged(outcome, pair, weights, _owner((outcome, pair))), pair) for outcome, pair in found]


def _owner(one: tuple[Outcome, Pair]) -> str:
    """Return the parameter of a master that one side has; empty for other tensors."""
    outcome, pair = one
    state = state_of(pair.name) if outcome.verdict in ("missing", "added") else None
    return state[0] if state is not None and state[1] in MASTERS else ""


def _judged(outcome: Outcome, pair: Pair, weights: Mapping[str, Pair], owner: str) -> Outcome:
    own = pair.one or pair.other
    fits = [one for name, one in weights.items() if name == owner or name.endswith(f".{owner}")] if owner else []
    if len(fits) != 1 or own is None:
        return outcome
    at = int(pair.one is not None)
    weight = (fits[0].one, fits[0].other)[at]
    if weight is None or weight.dtype != own.dtype or weight.shape != own.shape:
        return outcome
    side, name = SIDES[at], printable(weight.name)
    if is_same(own, weight):
        return outcome.became("tied", f"{outcome.why}: the {side} has it as its weight {name}", other=weight.name)
    return outcome.became(outcome.verdict, f"{outcome.why}; the {side}'s weight {name} has other values")
