"""Why a weight differs after the step: how its step relates to the unsharded model's.

A weight's step is what the optimizer added to it. Every rank's step may be the unsharded one times a number, or differ
from it by a part of the weight itself, as weight decay does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.rules.ratios.factors import splits
from shardviz.check.step.rules.ratios.norms import norms_of_parts, total
from shardviz.check.step.update.parts import (
    by_own_statistics,
    of_normed_parts,
    of_orthogonal_parts,
    of_this_part,
)
from shardviz.check.step.update.steps import (
    Why,
    factor_to,
    factors_of,
    is_equal,
    is_stepped_once,
    other_weights,
    steps_of,
)
from shardviz.check.step.words import number
from shardviz.explain.factors import ClippedByParts, NormOverWrongAxes
from shardviz.explain.update import (
    AnotherDecay,
    AnotherLearningRate,
    RankDependentDecay,
    RankDependentStep,
    RepeatedStep,
    StepOfPart,
    TrainedThoughFrozen,
)
from shardviz.relate.tolerance import EXPLAINED_UPDATE, FEW
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause

MAX_LISTED = 4


def why_weight(evidence: Evidence, result: Compared) -> Why | None:
    """Return why a weight differs after the step, if its step shows that."""
    dump = evidence.dump
    if dump.find("reference", "grad", result.name) is None and dump.find("step", "grad", result.name) is not None:
        return Why("it has a gradient, and the unsharded model's has none", TrainedThoughFrozen())
    factors = factors_of(dump, result)
    apart = {rank: factor for rank, factor in factors.items() if abs(factor - 1) > EXPLAINED_UPDATE}
    if apart:
        return of_normed_parts(dump, result) or _by_norms(evidence, result, factors) or _scaled(dump, result, factors)
    return (
        _decayed(dump, result)
        or of_orthogonal_parts(dump, result)
        or by_own_statistics(dump, result)
        or of_this_part(dump, result)
    )


def _by_norms(evidence: Evidence, result: Compared, factors: Mapping[int, float]) -> Why | None:
    """Return that a step is scaled by the norm of a part instead of the whole, or by a norm of copies."""
    gradients = list(evidence.gradients.values())
    whole = total(gradient.wanted for gradient in gradients)
    norms = {rank: total(of.reduced[rank] for of in gradients if rank in of.reduced) for rank in factors}
    shown = listed((f"{_times(factor)} on rank {rank}" for rank, factor in factors.items()), MAX_LISTED)
    steps = f"ranks step it by other multiples of the unsharded model's step: {shown}"
    if all(norms.values()) and all(is_equal(factor, whole / norms[rank]) for rank, factor in factors.items()):
        return Why(f"{steps}, as the norms of each rank's own gradients differ from that of all", ClippedByParts())
    if not gradients or len(set(map(number, factors.values()))) == 1:
        return _by_norm_of_copies(gradients, factors)
    gradient, before = (evidence.dump.find("reference", role, result.name) for role in ("grad", "param"))
    assert before is not None, "it was compared with what it was before"
    if gradient is None:
        return None
    sizes = [evidence.dump.values(tensor.first, result.name) for tensor in (gradient, before)]
    of_gradient, of_weight = (_shares(result, size.reshape(result.wanted.shape), factors) for size in sizes)
    ways = {
        "its gradient's norm": {rank: 1 / of_gradient[rank] for rank in of_gradient if of_gradient[rank]},
        "its own norm": of_weight,
        "the ratio of its norm and its gradient's": {
            rank: of_weight[rank] / of_gradient[rank] for rank in factors if of_gradient[rank]
        },
    }
    for what, due in ways.items():
        if len(due) == len(factors) and all(is_equal(factor, due[rank]) for rank, factor in factors.items()):
            return Why(f"{steps}, as {what} on the rank differs from that of the whole weight", StepOfPart())
    return None


def _shares(result: Compared, whole: NDArray[np.float64], factors: Mapping[int, float]) -> dict[int, float]:
    """Return the norm of each rank's part of an array, relative to that of the whole."""
    size = float(np.linalg.norm(whole)) or 1.0
    return {rank: float(np.linalg.norm(result.part(whole, rank))) / size for rank in factors}


def _by_norm_of_copies(gradients: Sequence[Compared], factors: Mapping[int, float]) -> Why | None:
    """Return that all steps are divided by one norm of gradients that is not the norm of all of them."""
    factor, whole = next(iter(factors.values())), total(gradient.wanted for gradient in gradients)
    for what, norm in norms_of_parts(list(gradients)) if gradients else ():
        if not norm or not is_equal(factor, whole / norm) or is_equal(norm, whole):
            continue
        times = f"the optimizer's step of it is {_times(factor)} the unsharded model's on every rank"
        copied = [(one.name, axis) for one in gradients for axis in one.mesh.axes if not splits(one, axis)]
        copied = [pair for pair in copied if pair[1] in what.partition("over ")[2].partition(" of ")[0].split(" and ")]
        if "squares" in what and copied:
            cause: Cause = NormOverWrongAxes(*copied[0], "", "")
            return Why(f"{times}: the norm of all gradients divided by {what}", cause)
        return Why(f"{times}: the norm of all gradients divided by {what}", ClippedByParts(what, factor * norm))
    return None


def _scaled(dump: Dump, result: Compared, factors: Mapping[int, float]) -> Why:
    """Return why every rank's step is a multiple of the unsharded model's, as other weights' steps say."""
    why = scaled(factors)
    settings = {setting for record in dump.files.ranks.values() for setting in record.other_settings}
    if isinstance(why.cause, AnotherLearningRate):
        is_seen = any(setting.startswith("lr of group") for setting in settings)
        return replace(why, cause=AnotherLearningRate(is_seen))
    if isinstance(why.cause, RepeatedStep) and any(
        is_stepped_once(dump, other) for other in other_weights(dump, result)
    ):
        return replace(why, cause=replace(why.cause, of_all=False))
    return why


def scaled(factors: Mapping[int, float]) -> Why:
    """Return why every rank's step is a multiple of the unsharded model's."""
    low, high = min(factors.values()), max(factors.values())
    if high - low > EXPLAINED_UPDATE * max(abs(low), abs(high)):
        shown = listed((f"{_times(factor)} on rank {rank}" for rank, factor in factors.items()), MAX_LISTED)
        return Why(
            f"ranks step it by other multiples of the unsharded model's step: {shown}",
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


def _decayed(dump: Dump, result: Compared) -> Why | None:
    """Return the explanation if a step differs from the unsharded model's by one multiple of the weight."""
    before = dump.find("reference", "param", result.name)
    assert before is not None, "it was compared with what it was before"
    start = dump.values(before.first, result.name)
    pairs = [(got - due, rank) for rank, (got, due) in steps_of(dump, result).items() if rank in result.wrong]
    off = np.concatenate([difference.ravel() for difference, _ in pairs]) if pairs else np.zeros(0)
    own = [result.part(start, rank).ravel() for _, rank in pairs]
    weights = np.concatenate(own) if own else np.zeros(0)
    if np.count_nonzero(weights) < FEW or np.ptp(weights) <= EXPLAINED_UPDATE * float(np.max(np.abs(weights))):
        return None
    factor = factor_to(off, weights)
    if not factor:
        return None
    more = "decayed more" if factor < 0 else "decayed less"
    if len(result.wrong) < len(result.values):
        ranks = named_ranks(result.wrong, MAX_LISTED)
        return Why(
            f"on {ranks} its step differs from the unsharded model's by {number(factor)} times the weight itself: "
            f"it is {more} there, and as it should be elsewhere",
            RankDependentDecay(),
        )
    return Why(
        f"its step differs from the unsharded model's by {number(factor)} times the weight itself: it is {more}",
        AnotherDecay(),
    )
