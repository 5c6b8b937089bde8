"""Why a state of the optimizer, or an average of weights that a step keeps in a buffer, differs after the step.

A state may be of another rank or in another order, as it was loaded, or start from zeros: what the gradient adds in the
step is the same in all cases, so what is left says what it started from. A factor, each rank's own statistics or an old
weight come from what the optimizer computed in the step.

A moving average is a share of its old values and a share of a weight's, before or after the step. The shares that the
unsharded model's buffer has say how it is made, whatever code makes it; a rank's buffer has shares of its own, or is
what it was.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared, Reason, laid_out, weight_of, whole_of
from shardviz.check.step.rules.factors import size_in_words
from shardviz.check.step.update.reasons import (
    MAX_LISTED,
    by_norm_of_copies,
    by_own_norms,
    factor_to,
    factors_of,
    rows_of_part,
    shown,
)
from shardviz.explain.checkpoints.states import (
    StateInAnotherOrder,
    StateNotLoaded,
    StateOfAnotherRank,
    UnexplainedState,
)
from shardviz.explain.step.buffers import OtherAverage
from shardviz.explain.step.update import RankDependentStep, ScaledState, StateOfOldWeight, StateOfParts
from shardviz.explain.templates import number
from shardviz.relate.factors import factor_of, ratio_near
from shardviz.relate.measures import weights_between
from shardviz.relate.tolerance import EXPLAINED_UPDATE, FEW, MANY, SINGLE, STEP
from shardviz.relate.values import error_of
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Mesh

    Values = NDArray[np.float64]
    Shares = tuple[float, str]
    """How much an average keeps of its old values, and the moment of the weight that it takes: before or after."""


def why_state(evidence: Evidence, state: Compared, ranks: Sequence[int]) -> Reason | None:
    """Return why an optimizer's state differs after the step; None if no rule explains it."""
    return (
        _of_frozen_rows(evidence.dump, state)
        or state_in_another_order(state, ranks)
        or _why_computed(evidence, state, ranks)
        or _why_loaded(evidence.dump, state)
    )


def _of_frozen_rows(dump: Dump, state: Compared) -> Reason | None:
    """Return that the optimizer was given zeros for other rows of the weight than the unsharded model's."""
    weight = _weight_after(dump, state)
    return rows_of_part(dump, weight) if weight is not None else None


def _weight_after(dump: Dump, state: Compared) -> Compared | None:
    """Return the weight that a state is of, after the step; None if it wasn't recorded, or can't be compared."""
    name = weight_of(state.role, state.name)
    end, stepped = whole_of(dump, "param", name, "updated"), dump.find("step", "param", name)
    moved = laid_out(dump, stepped, name, end, state.rounding) if end is not None and stepped is not None else None
    return moved if moved is not None and not moved.incomparable else None


def _why_computed(evidence: Evidence, state: Compared, ranks: Sequence[int]) -> Reason | None:
    """Return why the optimizer computed a different state on some ranks; None if no rule explains it."""
    return _of_old_weight(evidence, state, ranks) or state_of_parts(state) or _scaled_state(evidence, state)


def unexplained_state(evidence: Evidence, state: Compared) -> UnexplainedState:
    """Return what is known of a state that no rule explains."""
    return UnexplainedState(" and ".join(state.copies_differ_along), "zeros" if _power(evidence, state) else "")


def _of_old_weight(evidence: Evidence, state: Compared, ranks: Sequence[int]) -> Reason | None:
    """Return that a state which follows its weight has the weight from before the step, on ranks that got it later."""
    start, moved = (
        whole_of(evidence.dump, "param", weight_of(state.role, state.name)),
        _weight_after(evidence.dump, state),
    )
    if start is None or moved is None or start.size != state.wanted.size or len(ranks) == len(state.reduced):
        return None
    for rank in ranks:
        old = state.part(start, rank)
        is_new = rank in moved.reduced and moved.is_right(rank, moved.reduced[rank])
        if not is_new or not _is_of(state, state.reduced[rank], old) or _is_of(state, state.wanted_of(rank), old):
            return None
    where = named_ranks(ranks, MAX_LISTED)
    sentence = f"on {where} the optimizer's state follows the weight from before the step, and the weight is right"
    return Reason(StateOfOldWeight(), sentence)


def _is_of(state: Compared, values: NDArray[np.float64], old: NDArray[np.float64]) -> bool:
    """Whether numbers are a weight's, times a number, as far as rounding allows."""
    factor = factor_of(values, old) if np.count_nonzero(old) >= FEW else None
    return factor is not None and state.near(values, factor * old)


def state_of_parts(state: Compared) -> Reason | None:
    """Return that each rank has statistics of its own part, if their mean or sum over ranks is the right state."""
    axes = tuple(state.copies_differ_along)
    for op in ("avg", "sum") if axes and state.wanted.size > 1 else ():
        values = state.over(axes, op)
        if values and all(state.is_right(rank, value) for rank, value in values.items()):
            along = " and ".join(axes)
            sentence = f"each rank along {along} has its own state; the {op} over {along} is the unsharded model's"
            return Reason(StateOfParts(along, op), sentence)
    return None


def _scaled_state(evidence: Evidence, state: Compared) -> Reason | None:
    """Return that every rank's state is a multiple of the unsharded model's."""
    factors = factors_of(state) if np.count_nonzero(state.wanted) >= FEW and np.ptp(state.wanted) else {}
    if all(abs(factor - 1) <= EXPLAINED_UPDATE for factor in factors.values()):
        return None
    is_square = _power(evidence, state) == 2
    of_gradient = {rank: abs(factor) ** 0.5 if is_square else factor for rank, factor in factors.items()}
    first, *others = map(number, factors.values())
    if any(other != first for other in others):
        if any(np.count_nonzero(state.wanted_of(rank)) < 2 for rank in factors):
            return None
        update = np.sqrt(np.abs(state.wanted)) if is_square else state.wanted
        sentence = f"ranks have other multiples of the unsharded model's state: {shown(factors)}"
        why = by_own_norms(evidence, state, update, of_gradient, sentence)
        return why or Reason(RankDependentStep(state.name.rpartition(".")[2]), sentence)
    of = "the root of the optimizer's state" if is_square else "the optimizer's state"
    times = f"the optimizer's state is {first} times the unsharded model's on every rank"
    return by_norm_of_copies(list(evidence.gradients.values()), of_gradient, of) or Reason(ScaledState(), times)


def _power(evidence: Evidence, state: Compared) -> int:
    """Return the power of the gradient that the unsharded model's state is a multiple of; 0 if it is none.

    Such a state started from zeros, so nothing was loaded.
    """
    whole = whole_of(evidence.dump, "grad", weight_of("optim", state.name))
    if whole is None or whole.size != state.wanted.size or np.count_nonzero(whole) < FEW:
        return 0
    whole = whole.reshape(state.wanted.shape)
    return next((power for power in (1, 2) if factor_to(state.wanted, whole**power) is not None), 0)


def _why_loaded(dump: Dump, comparison: Compared) -> Reason | None:
    """Return why an optimizer's state differs after the step, if it shows what it started from."""
    whole = whole_of(dump, "grad", weight_of("optim", comparison.name))
    if whole is None or whole.size != comparison.wanted.size:
        return None
    for added in (whole, whole**2):
        parts = {rank: comparison.part(added, rank) for rank in comparison.reduced}
        if _are_multiples(comparison, parts):
            of_zeros = "the optimizer's state is what the first step leaves that starts from zeros"
            return Reason(StateNotLoaded(), f"{of_zeros}; the unsharded model's is not")
        if others := _from_others(comparison, parts):
            return of_others(others)
    return None


def _are_multiples(comparison: Compared, parts: Mapping[int, NDArray[np.float64]]) -> bool:
    """Whether all ranks' state is one multiple of what a step adds, and the wanted state is not a multiple."""
    got = np.concatenate([comparison.reduced[rank].ravel() for rank in parts])
    expected = np.concatenate([comparison.wanted_of(rank).ravel() for rank in parts])
    added = np.concatenate([part.ravel() for part in parts.values()])
    if np.count_nonzero(added) < FEW or not np.any(got):
        return False
    return factor_to(got, added) is not None and factor_to(expected, added) is None


def _from_others(comparison: Compared, parts: Mapping[int, NDArray[np.float64]]) -> dict[int, int]:
    """Return for each wrong rank the rank from whose part of the state it started; empty if one has none."""
    owners: dict[int, int] = {}
    for rank in comparison.wrong:
        owner = next((other for other in parts if _is_from(comparison, parts, rank, other)), None)
        if owner is None:
            return {}
        owners[rank] = owner
    return owners


def _is_from(comparison: Compared, parts: Mapping[int, NDArray[np.float64]], rank: int, source: int) -> bool:
    """Whether a rank's state is another's, but for what the two ranks' own gradients add to it.

    States that began as zeros differ by nothing else, so they tell nothing.
    """
    got, expected = comparison.reduced[rank], comparison.wanted_of(source)
    if comparison.regions[rank] == comparison.regions[source] or got.shape != expected.shape or got.size < FEW:
        return False
    off, added, due = got - expected, parts[rank] - parts[source], comparison.wanted_of(rank) - expected
    return bool(np.any(added)) and factor_to(off, added) is not None and factor_to(due, added) is None


def state_in_another_order(comparison: Compared, ranks: Sequence[int]) -> Reason | None:
    """Return why ranks have the numbers of their own part of a state at other places; None if they have not."""
    parts = [(comparison.reduced[rank].ravel(), comparison.wanted_of(rank).ravel()) for rank in ranks]
    if any(got.size < 2 or not comparison.near(np.sort(got), np.sort(due)) for got, due in parts):
        return None
    got, expected = parts[0]
    moved = int(np.count_nonzero(np.abs(got - expected) > comparison.tolerance))
    return Reason(
        StateInAnotherOrder(),
        f"the optimizer's state is in a different order within its part: {moved:,} of {got.size:,} elements of rank "
        f"{ranks[0]} are out of place",
    )


def of_others(others: Mapping[int, int]) -> Reason:
    """Return why ranks have the state of other ranks."""
    pairs = listed((f"rank {rank} has that of rank {other}" for rank, other in others.items()), MAX_LISTED)
    if len(set(others.values())) == 1:
        first = next(iter(others.values()))
        sentence = f"the optimizer's state is of the same part on every rank, rank {first}'s"
        return Reason(StateOfAnotherRank(is_one=True), sentence)
    return Reason(StateOfAnotherRank(), f"the optimizer's state is of the part of another rank: {pairs}")


MOST_UPDATES = 64
"""An average is not taken to be updated more often in a step."""


def other_average(dump: Dump, comparison: Compared, ranks: Sequence[int]) -> Reason | None:
    """Return what differs in how a buffer averages a weight, if all wrong ranks have the same difference."""
    before = whole_of(dump, "buffer", comparison.name)
    for weight, (old, new) in _weights(dump, comparison.wanted.shape) if before is not None else ():
        if before is None or before.shape != comparison.wanted.shape:
            continue
        wanted = shares_of(comparison.wanted, before, {"before": old, "after": new})
        tensor = dump.find("step", "param", weight)
        if wanted is None or tensor is None:
            continue
        own = laid_out(dump, tensor, weight, new, comparison.rounding)
        causes = set()
        for rank in ranks:
            part = comparison.part(before, rank)
            if own.values.keys() != comparison.values.keys() or own.values[rank].shape != part.shape:
                return None
            sources = {"before": comparison.part(old, rank), "after": own.values[rank]}
            causes.add(_difference(wanted, comparison.reduced[rank], part, sources))
        if len(causes) == 1 and (cause := causes.pop()) is not None:
            which = f"on {named_ranks(ranks)} " if len(ranks) < len(comparison.reduced) else ""
            return Reason(cause, f"{which}the buffer is another average of {weight} than the unsharded model's")
    return None


def _weights(dump: Dump, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[Values, Values]]]:
    """Yield the unsharded model's weights of a shape, before and after the step."""
    for name, tensor in dump.by_name("updated", "param").items():
        old = whole_of(dump, "param", name) if tensor.shape == shape else None
        if old is not None and old.shape == shape:
            yield name, (old, dump.values(tensor.first, name))


def _difference(wanted: Shares, held: Values, before: Values, sources: Mapping[str, Values]) -> OtherAverage | None:
    """Return in what a rank's average differs from the wanted one; None if that is not known."""
    if error_of(held, before) <= SINGLE:
        return OtherAverage("none")
    shares = shares_of(held, before, sources)
    if shares is None:
        return None
    (kept, moment), (due, due_moment) = shares, wanted
    if not math.isclose(kept, due, rel_tol=STEP):
        return other_decay(kept, due, STEP * abs(kept))
    return OtherAverage("moment", moment, due_moment) if moment != due_moment else None


def other_decay(kept: float, due: float, near: float) -> OtherAverage:
    """Return that an average keeps another share of itself than is due: as if it were updated several times, or any."""
    times = round(math.log(kept) / math.log(due)) if 0 < kept < 1 and 0 < due < 1 else 0
    if 1 < times <= MOST_UPDATES and abs(kept - due**times) <= near:
        return OtherAverage("times", str(times))
    return OtherAverage("decay", number(kept), number(due))


def share_added(
    held: Values, wanted: Values, old: Values | None, mesh: Mesh, near: float
) -> tuple[Fraction, Values] | None:
    """Return which size of the mesh, or one over it, multiplies what a step adds to a buffer, and what that makes.

    A buffer that keeps a share of its old value is the wanted one times that number, plus a share of the old.
    """
    if old is None or {old.shape, held.shape} != {wanted.shape} or held.size < FEW:
        return None
    columns = np.stack([side.ravel() for side in ((wanted, old) if np.any(old) else (wanted,))], axis=1)
    weights = weights_between(columns, held.ravel())
    ratio = ratio_near(float(weights[0]), mesh.size, near) if weights is not None else None
    if weights is None or ratio is None or ratio == 1 or not size_in_words(mesh, ratio):
        return None
    return ratio, (columns @ weights).reshape(held.shape)


def shares_of(values: Values, before: Values, sources: Mapping[str, Values]) -> Shares | None:
    """Return the shares of which values are made; None if they aren't, or it is not certain of which weights."""
    fits = []
    for moment, source in sources.items() if values.size >= MANY else ():
        columns = np.stack([before.ravel(), source.ravel()], axis=1)
        (kept, taken), *_ = np.linalg.lstsq(columns, values.ravel(), rcond=None)
        made = (columns @ [kept, taken]).reshape(values.shape)
        if error_of(made, values) <= SINGLE and abs(taken) > STEP:
            fits.append((float(kept), moment))
    return fits[0] if len(fits) == 1 else None
