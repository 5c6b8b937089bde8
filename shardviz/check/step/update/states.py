"""Why an optimizer's state differs after the step: a factor, each rank's own statistics, or an old weight.

Such a state comes from what the optimizer computed in the step, not from what was loaded before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import laid_out
from shardviz.check.step.update.reasons import Why, by_norm_of_copies, factor_to, factors_of
from shardviz.check.step.words import number
from shardviz.explain.checkpoints.states import UnexplainedState
from shardviz.explain.step.update import ScaledState, StateOfOldWeight, StateOfParts
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import EXPLAINED_UPDATE, FEW
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence

MAX_LISTED = 4


def why_computed(evidence: Evidence, state: Compared, ranks: Sequence[int]) -> Why | None:
    """Return why the optimizer computed a different state on some ranks; None if no rule explains it."""
    return _of_old_weight(evidence, state, ranks) or _of_parts(state) or _scaled(evidence, state)


def unexplained_state(evidence: Evidence, state: Compared) -> UnexplainedState:
    """Return what is known of a state that no rule explains."""
    return UnexplainedState(" and ".join(state.copies_differ_along), "zeros" if _power(evidence, state) else "")


def _of_old_weight(evidence: Evidence, state: Compared, ranks: Sequence[int]) -> Why | None:
    """Return that a state which follows its weight has the weight from before the step, on ranks that got it later."""
    dump, weight = evidence.dump, state.name.rpartition(".")[0]
    before, after = dump.find("reference", "param", weight), dump.find("updated", "param", weight)
    stepped = dump.find("step", "param", weight)
    if before is None or after is None or stepped is None or len(ranks) == len(state.reduced):
        return None
    start = dump.values(before.first, weight)
    moved = laid_out(dump, stepped, weight, dump.values(after.first, weight), state.rounding)
    if start.size != state.wanted.size or moved.incomparable:
        return None
    for rank in ranks:
        old = state.part(start, rank)
        is_new = rank in moved.reduced and moved.is_right(rank, moved.reduced[rank])
        if not is_new or not _is_of(state, state.reduced[rank], old) or _is_of(state, state.wanted_of(rank), old):
            return None
    where = named_ranks(ranks, MAX_LISTED)
    sentence = f"on {where} the optimizer's state follows the weight from before the step, and the weight is right"
    return Why(sentence, StateOfOldWeight())


def _is_of(state: Compared, values: NDArray[np.float64], old: NDArray[np.float64]) -> bool:
    """Whether numbers are a weight's, times a number, as far as rounding allows."""
    factor = factor_of(values, old) if np.count_nonzero(old) >= FEW else None
    return factor is not None and state.near(values, factor * old)


def _of_parts(state: Compared) -> Why | None:
    """Return that each rank has statistics of its own part, if their mean or sum over ranks is the right state."""
    axes = tuple(state.copies_differ_along)
    for op in ("avg", "sum") if axes and state.wanted.size > 1 else ():
        values = state.over(axes, op)
        if values and all(state.is_right(rank, value) for rank, value in values.items()):
            along = " and ".join(axes)
            sentence = f"each rank along {along} has its own state; the {op} over {along} is the unsharded model's"
            return Why(sentence, StateOfParts(along, op))
    return None


def _scaled(evidence: Evidence, state: Compared) -> Why | None:
    """Return that every rank's state is one multiple of the unsharded model's."""
    factors = factors_of(state) if np.count_nonzero(state.wanted) >= FEW and np.ptp(state.wanted) else {}
    if not factors or abs(next(iter(factors.values())) - 1) <= EXPLAINED_UPDATE:
        return None
    first, *others = map(number, factors.values())
    if any(other != first for other in others):
        return None
    is_square = _power(evidence, state) == 2
    of_gradient = {rank: abs(factor) ** 0.5 if is_square else factor for rank, factor in factors.items()}
    of = "the root of the optimizer's state" if is_square else "the optimizer's state"
    times = f"the optimizer's state is {first} times the unsharded model's on every rank"
    return by_norm_of_copies(list(evidence.gradients.values()), of_gradient, of) or Why(times, ScaledState())


def _power(evidence: Evidence, state: Compared) -> int:
    """Return the power of the gradient that the unsharded model's state is a multiple of; 0 if it is none.

    Such a state started from zeros, so nothing was loaded.
    """
    name = state.name.rpartition(".")[0]
    gradient = evidence.dump.find("reference", "grad", name)
    whole = evidence.dump.values(gradient.first, name) if gradient is not None else np.zeros(0)
    if whole.size != state.wanted.size or np.count_nonzero(whole) < FEW:
        return 0
    whole = whole.reshape(state.wanted.shape)
    return next((power for power in (1, 2) if factor_to(state.wanted, whole**power) is not None), 0)
