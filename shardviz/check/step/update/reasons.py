"""Why a weight or an optimizer's state is another after the step: what it is beside the unsharded model's own.

A weight's step is what the optimizer added to it. Every rank's step may be the unsharded one times a number, or differ
from it by a part of the weight itself, as weight decay does. A state may have started from zeros, or from the part of
another rank: what the gradient added to it is the same in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.rules.ratios.factors import splits
from shardviz.check.step.rules.ratios.norms import norms_of_parts, total
from shardviz.check.step.words import number
from shardviz.explain.factors import ClippedByParts, NormOverWrongAxes
from shardviz.explain.states import StateInAnotherOrder, StateNotLoaded, StateOfAnotherRank
from shardviz.explain.update import (
    AnotherDecay,
    AnotherLearningRate,
    RankDependentDecay,
    RankDependentStep,
    RepeatedStep,
    StepOfPart,
)
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import EXPLAINED_UPDATE, FEW, LEAST_SINGULAR
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause

MAX_LISTED = 4

MAX_MATRIX = 1 << 10
"""Rows and columns of a matrix whose singular values are looked at."""


@dataclass(frozen=True)
class Why:
    """An explanation of a wrong weight or state.

    Attributes:
        sentence: What is wrong, in numbers.
        cause: The most likely cause.
    """

    sentence: str
    cause: Cause


def steps_of(dump: Dump, one: Compared) -> dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return for each rank the step of a weight and the unsharded model's step of the same elements."""
    before, after = dump.find("reference", "param", one.name), dump.find("updated", "param", one.name)
    if before is None or after is None:
        return {}
    start, end = (dump.values(tensor.first, one.name) for tensor in (before, after))
    found = {}
    for rank, values in one.reduced.items():
        own = one.part(start, rank)
        found[rank] = values - own, one.part(end, rank) - own
    return found


def factors_of(dump: Dump, one: Compared) -> dict[int, float]:
    """Return the number of unsharded steps that each rank's step is; empty where some rank's is not such a multiple."""
    steps = steps_of(dump, one)
    found = {rank: _factor(got, due) for rank, (got, due) in steps.items() if np.any(due)}
    known = {rank: factor for rank, factor in found.items() if factor is not None}
    enough = sum(np.count_nonzero(due) for _, due in steps.values()) >= FEW
    return known if enough and len(known) == len(found) else {}


def _factor(got: NDArray[np.float64], due: NDArray[np.float64]) -> float | None:
    factor = factor_of(got, due)
    return factor if factor is not None and _is_near(got, factor * due) else None


def _is_near(got: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    size = max(float(np.max(np.abs(one), initial=0.0)) for one in (got, other))
    return bool(np.max(np.abs(got - other), initial=0.0) <= EXPLAINED_UPDATE * size)


def why_weight(evidence: Evidence, one: Compared) -> Why | None:
    """Return why a weight is another after the step, where its step shows that."""
    dump = evidence.dump
    factors = factors_of(dump, one)
    apart = {rank: factor for rank, factor in factors.items() if abs(factor - 1) > EXPLAINED_UPDATE}
    if apart:
        return _of_normed_parts(dump, one) or _by_norms(evidence, one, factors) or scaled(factors)
    return _decayed(dump, one) or _of_orthogonal_parts(dump, one)


def _of_orthogonal_parts(dump: Dump, one: Compared) -> Why | None:
    """Return that each rank's step is an orthogonal matrix of its own, which only the whole step should be."""
    whole, steps = _whole_step(dump, one), _steps_of_parts(dump, one)
    if whole is None or not steps or not _is_orthogonal(whole):
        return None
    if not all(_is_orthogonal(got) for got, _ in steps):
        return None
    return Why("each rank's step of it is an orthogonal matrix, as the whole step should be", StepOfPart())


def _of_normed_parts(dump: Dump, one: Compared) -> Why | None:
    """Return that each rank's step has the norm that the whole step should have."""
    whole, steps = _whole_step(dump, one), _steps_of_parts(dump, one)
    norm = float(np.linalg.norm(whole)) if whole is not None else 0.0
    norms = [(float(np.linalg.norm(got)), float(np.linalg.norm(due))) for got, due in steps]
    if not norm or not norms or not all(_is_equal(held, norm) and not _is_equal(due, norm) for held, due in norms):
        return None
    return Why(f"each rank's step has the norm {number(norm)}, which the whole one should have", StepOfPart())


def _by_norms(evidence: Evidence, one: Compared, factors: Mapping[int, float]) -> Why | None:
    """Return that a step is scaled by the norm of a part where that of the whole is due, or by a norm of copies."""
    gradients = list(evidence.gradients.values())
    if not gradients or len(set(map(number, factors.values()))) == 1:
        return _by_norm_of_copies(gradients, factors)
    whole = total(gradient.wanted for gradient in gradients)
    own = {rank: total(of.reduced[rank] for of in gradients if rank in of.reduced) for rank in factors}
    shown = listed((f"{_times(factor)} on rank {rank}" for rank, factor in factors.items()), MAX_LISTED)
    steps = f"ranks step it by different multiples of the unsharded model's step: {shown}"
    if all(own.values()) and all(_is_equal(factor, whole / own[rank]) for rank, factor in factors.items()):
        return Why(f"{steps}, as the norms of each rank's own gradients differ from that of all", ClippedByParts())
    gradient, before = (evidence.dump.find("reference", role, one.name) for role in ("grad", "param"))
    if gradient is None or before is None:
        return None
    sizes = [evidence.dump.values(tensor.first, one.name) for tensor in (gradient, before)]
    of_gradient, of_weight = (_shares(one, size.reshape(one.wanted.shape), factors) for size in sizes)
    ways = {
        "its gradient's norm": {rank: 1 / of_gradient[rank] for rank in of_gradient if of_gradient[rank]},
        "its own norm": of_weight,
        "the ratio of its norm and its gradient's": {
            rank: of_weight[rank] / of_gradient[rank] for rank in factors if of_gradient[rank]
        },
    }
    for what, due in ways.items():
        if len(due) == len(factors) and all(_is_equal(factor, due[rank]) for rank, factor in factors.items()):
            return Why(f"{steps}, as {what} on the rank differs from that of the whole weight", StepOfPart())
    return None


def _shares(one: Compared, whole: NDArray[np.float64], factors: Mapping[int, float]) -> dict[int, float]:
    """Return the norm of each rank's part of an array, relative to that of the whole."""
    size = float(np.linalg.norm(whole)) or 1.0
    return {rank: float(np.linalg.norm(one.part(whole, rank))) / size for rank in factors}


def _by_norm_of_copies(gradients: Sequence[Compared], factors: Mapping[int, float]) -> Why | None:
    """Return that all steps are divided by one norm of gradients that is not the norm of all of them."""
    factor, whole = next(iter(factors.values())), total(gradient.wanted for gradient in gradients)
    for what, norm in norms_of_parts(list(gradients)) if gradients else ():
        if not norm or not _is_equal(factor, whole / norm) or _is_equal(norm, whole):
            continue
        times = f"the optimizer's step of it is {_times(factor)} the unsharded model's on every rank"
        copied = [(one.name, axis) for one in gradients for axis in one.mesh.axes if not splits(one, axis)]
        copied = [pair for pair in copied if pair[1] in what.partition("over ")[2].partition(" of ")[0].split(" and ")]
        if "squares" in what and copied:
            cause: Cause = NormOverWrongAxes(*copied[0], "", "")
            return Why(f"{times}: the norm of all gradients divided by {what}", cause)
        return Why(f"{times}: the norm of all gradients divided by {what}", ClippedByParts(what, factor * norm))
    return None


def _whole_step(dump: Dump, one: Compared) -> NDArray[np.float64] | None:
    before, after = dump.find("reference", "param", one.name), dump.find("updated", "param", one.name)
    if before is None or after is None:
        return None
    return dump.values(after.first, one.name) - dump.values(before.first, one.name)


def _steps_of_parts(dump: Dump, one: Compared) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the step of each rank's part and the due one, of parts that are neither empty nor the whole."""
    return [pair for pair in steps_of(dump, one).values() if 0 < pair[0].size < one.wanted.size]


def _is_orthogonal(step: NDArray[np.float64]) -> bool:
    """Whether the singular values of a matrix are alike, as Muon makes them."""
    if step.ndim != 2 or min(step.shape) < FEW or max(step.shape) > MAX_MATRIX or not np.isfinite(step).all():
        return False
    square = step @ step.T if step.shape[0] <= step.shape[1] else step.T @ step
    if np.linalg.norm(square - np.diag(np.diag(square))) > np.linalg.norm(square) * (1 - LEAST_SINGULAR):
        return False  # far from orthogonal, at a fraction of the cost
    sizes = np.linalg.svd(step, compute_uv=False)
    return bool(sizes[-1] >= LEAST_SINGULAR * sizes[0] > 0)


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=EXPLAINED_UPDATE)


def scaled(factors: Mapping[int, float]) -> Why:
    """Return why every rank's step is a multiple of the unsharded model's."""
    low, high = min(factors.values()), max(factors.values())
    if high - low > EXPLAINED_UPDATE * max(abs(low), abs(high)):
        shown = listed((f"{_times(factor)} on rank {rank}" for rank, factor in factors.items()), MAX_LISTED)
        return Why(
            f"ranks step it by different multiples of the unsharded model's step: {shown}",
            RankDependentStep(),
        )
    whole = round(high)
    if whole >= 2 and abs(high - whole) <= EXPLAINED_UPDATE * whole:
        return Why(
            f"the optimizer's step of it is {whole} times the unsharded model's on every rank",
            RepeatedStep(whole),
        )
    return Why(
        f"the optimizer's step of it is {_times(high)} the unsharded model's on every rank",
        AnotherLearningRate(),
    )


def _times(factor: float) -> str:
    return "once" if number(factor) == "1" else f"{number(factor)} times"


def _decayed(dump: Dump, one: Compared) -> Why | None:
    """Return the explanation where a step differs from the unsharded model's by one multiple of the weight."""
    before = dump.find("reference", "param", one.name)
    if before is None:
        return None
    start = dump.values(before.first, one.name)
    pairs = [(got - due, rank) for rank, (got, due) in steps_of(dump, one).items() if rank in one.wrong]
    off = np.concatenate([difference.ravel() for difference, _ in pairs]) if pairs else np.zeros(0)
    own = [one.part(start, rank).ravel() for _, rank in pairs]
    weights = np.concatenate(own) if own else np.zeros(0)
    if np.count_nonzero(weights) < FEW or np.ptp(weights) <= EXPLAINED_UPDATE * float(np.max(np.abs(weights))):
        return None
    factor = _factor(off, weights)
    if not factor:
        return None
    more = "decayed more" if factor < 0 else "decayed less"
    if len(one.wrong) < len(one.values):
        ranks = named_ranks(one.wrong, MAX_LISTED)
        return Why(
            f"on {ranks} its step differs from the unsharded model's by {number(factor)} times the weight itself: "
            f"it is {more} there, and as it should be elsewhere",
            RankDependentDecay(),
        )
    return Why(
        f"its step differs from the unsharded model's by {number(factor)} times the weight itself: it is {more}",
        AnotherDecay(),
    )


def why_state(dump: Dump, one: Compared) -> Why | None:
    """Return why an optimizer's state is another after the step, where it shows what it started from."""
    gradient = dump.find("reference", "grad", one.name.rpartition(".")[0])
    if gradient is None:
        return None
    whole = dump.values(gradient.first, one.name.rpartition(".")[0])
    if whole.size != one.wanted.size:
        return None
    for added in (whole, whole**2):
        parts = {rank: one.part(added, rank) for rank in one.reduced}
        if _are_multiples(one, parts):
            return Why(
                "the optimizer's state is what the first step leaves that starts from zeros; the unsharded model's is "
                "not",
                StateNotLoaded(),
            )
        if others := _from_others(one, parts):
            return of_others(others)
    return None


def _are_multiples(one: Compared, parts: Mapping[int, NDArray[np.float64]]) -> bool:
    """Whether all ranks' state is one multiple of what a step adds, and the wanted state is not a multiple."""
    got, due = (np.concatenate([values[rank].ravel() for rank in parts]) for values in (one.reduced, _wanted(one)))
    added = np.concatenate([part.ravel() for part in parts.values()])
    if np.count_nonzero(added) < FEW or not np.any(got):
        return False
    return _factor(got, added) is not None and _factor(due, added) is None


def _wanted(one: Compared) -> dict[int, NDArray[np.float64]]:
    return {rank: one.wanted_of(rank) for rank in one.reduced}


def _from_others(one: Compared, parts: Mapping[int, NDArray[np.float64]]) -> dict[int, int]:
    """Return for each wrong rank the rank from whose part of the state it started; empty where one has none."""
    found: dict[int, int] = {}
    for rank in one.wrong:
        owner = next((other for other in parts if _is_from(one, parts, rank, other)), None)
        if owner is None:
            return {}
        found[rank] = owner
    return found


def _is_from(one: Compared, parts: Mapping[int, NDArray[np.float64]], rank: int, other: int) -> bool:
    """Whether a rank's state is another's, but for what the two ranks' own gradients add to it."""
    got, due = one.reduced[rank], one.wanted_of(other)
    if one.regions[rank] == one.regions[other] or got.shape != due.shape or got.size < FEW:
        return False
    off, added = got - due, parts[rank] - parts[other]
    return bool(np.any(added)) and _factor(off, added) is not None


def of_another_order(one: Compared, ranks: Sequence[int]) -> Why | None:
    """Return why ranks have the numbers of their own part of a state at other places; None where they have not."""
    parts = [(one.reduced[rank].ravel(), one.wanted_of(rank).ravel()) for rank in ranks]
    if any(got.size < 2 or not one.near(np.sort(got), np.sort(due)) for got, due in parts):
        return None
    got, due = parts[0]
    moved = int(np.count_nonzero(np.abs(got - due) > one.tolerance))
    return Why(
        f"the optimizer's state is in another order within its part: {moved:,} of {got.size:,} elements of rank "
        f"{ranks[0]} are out of place",
        StateInAnotherOrder(),
    )


def of_others(others: Mapping[int, int]) -> Why:
    """Return why ranks have the state of other ranks."""
    pairs = listed((f"rank {rank} has that of rank {other}" for rank, other in others.items()), MAX_LISTED)
    if len(set(others.values())) == 1:
        first = next(iter(others.values()))
        return Why(
            f"the optimizer's state is of the same part on every rank, rank {first}'s", StateOfAnotherRank(is_one=True)
        )
    return Why(f"the optimizer's state is of the part of another rank: {pairs}", StateOfAnotherRank())
