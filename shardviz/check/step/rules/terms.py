"""What no ratio explains: a parameter added too often, shards that were summed as if they were copies, and ranks of
which only some are right. If none of these fits, it is a `wrong-value`, with the place at which it is off.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.advice import where_to_look
from shardviz.check.step.rules.losses import cause_of_value
from shardviz.check.step.rules.ratios.factors import splits
from shardviz.check.step.rules.ratios.scale import size_in_words
from shardviz.check.step.words import WHAT, claimed_text
from shardviz.dump.records.base import WEIGHTS
from shardviz.explain.step import RankDependentCode, UnexplainedCopies, WeightOnSomeRanks
from shardviz.explain.sums import MixedShards, RepeatedTerm, TermLeftOut
from shardviz.explain.templates import number
from shardviz.layout.region import index_of
from shardviz.relate.factors import whole_multiple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Values = dict[int, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Added:
    """A vector of the model that every row of a result has.

    Attributes:
        name: Its name.
        values: Its values in the unsharded model.
        times: How often too many it was added; -1 if it was left out.
    """

    name: str
    values: NDArray[np.float64]
    times: int


def check_terms(evidence: Evidence, result: Compared) -> Finding:
    """Return the finding of a tensor that is off by no ratio."""
    dump = evidence.dump
    rank = result.wrong[0]
    excess = result.reduced[rank] - result.wanted_of(rank)
    found = added_too_often(dump, result) or mixed_shards(result)
    if found is not None:
        return found
    cause = cause_of_value(evidence, result) or where_to_look(evidence, result)
    right = [rank for rank in result.reduced if rank not in result.wrong]
    is_on_some_ranks = bool(result.copies_differ_along and right)
    if is_on_some_ranks:
        cause = _on_some_ranks(dump, result, right)
    elif result.copies_differ_along:
        cause = UnexplainedCopies(" and ".join(result.copies_differ_along), cause)
    return cause.finding(
        result.name,
        result.wrong,
        _where(result, rank, excess),
        kind="wrong-value",
        claimed=claimed_text(result),
        generic=not is_on_some_ranks,
    )


def added_too_often(dump: Dump, result: Compared) -> Finding | None:
    """Return the finding if a vector of the model was added to every row too often, or not at all."""
    added = vector_added(dump, result)
    return _added_too_often(result, added.name, added.times) if added is not None else None


def vector_added(dump: Dump, result: Compared) -> Added | None:
    """Return the vector of the model that a wrong result has in every row too often, or not at all."""
    rank = result.wrong[0]
    excess = result.reduced[rank] - result.wanted_of(rank)
    names, vectors = dump.vectors(excess.shape[-1:])
    for index in _candidates(result, excess, vectors) if names else ():
        if times := whole_multiple(excess, np.broadcast_to(vectors[index], excess.shape), result.tolerance):
            return Added(names[index], vectors[index], times)
    return None


def _candidates(result: Compared, excess: NDArray[np.float64], vectors: NDArray[np.float64]) -> list[int]:
    """Return the rows of `vectors` that may have been added: the mean row of the excess is a whole number of times one.

    All are tried at once, since each result that is wrong tries all of the model's.
    """
    if not excess.size or not np.all(np.isfinite(excess)):
        return []
    mean = excess.reshape(-1, vectors.shape[1]).mean(0)
    squares = np.sum(vectors * vectors, axis=1)
    times = np.rint(np.divide(vectors @ mean, squares, out=np.zeros_like(squares), where=squares > 0))
    with np.errstate(invalid="ignore"):  # a vector with infinity
        off = np.max(np.abs(mean - times[:, None] * vectors), axis=1)
    # The rows are each as near as this, and the mean nearer still; twice as far for what rounding does to it.
    return [int(index) for index in np.flatnonzero(times) if off[index] <= 2 * result.tolerance * abs(times[index])]


def _not_finite(result: Compared, rank: int) -> str:
    """Say how many values are NaN or infinite although the wanted ones are finite, and which comes first."""
    values, what = result.reduced[rank], WHAT[result.role]
    odd = np.flatnonzero(~np.isfinite(values.ravel()))
    if not values.ndim:
        return f"the {what} is {number(float(values))} on rank {rank}; {result.whose} is {number(float(result.wanted))}"
    at = index_of(int(result.regions[rank].flat_ids(result.wanted.shape).ravel()[odd[0]]), result.wanted.shape)
    count = f"{len(odd):,} of {values.size:,} elements"
    return f"the {what} is NaN or infinite in {count} on rank {rank}, the first at {at}; {result.whose} are finite"


def _where(result: Compared, rank: int, excess: NDArray[np.float64]) -> str:
    """Say how far values are off, how many are, and which comes first."""
    if not np.all(np.isfinite(excess)):
        return _not_finite(result, rank)
    worst = float(np.max(np.abs(excess), initial=0.0))
    size = float(np.max(np.abs(result.wanted), initial=0.0))
    off = np.flatnonzero(~(np.abs(excess.ravel()) <= result.tolerance))
    text = f"the {WHAT[result.role]} is off by up to {number(worst)} on rank {rank} (largest value {number(size)}, "
    text += f"rounding allows {number(result.tolerance)})"
    if excess.ndim and len(off):
        at = int(result.regions[rank].flat_ids(result.wanted.shape).ravel()[off[0]])
        text += f": {len(off):,} of {excess.size:,} elements, the first at {index_of(at, result.wanted.shape)}"
    return text


def _added_too_often(result: Compared, name: str, times: int) -> Finding:
    axes = size_in_words(result.mesh, Fraction(times + 1)) if times > 0 else ""
    over = f", once on every rank of {axes}" if axes else ""
    cause: Cause = RepeatedTerm(name, axes) if times > 0 else TermLeftOut(name)
    return cause.finding(
        name,
        result.wrong,
        f"the {WHAT[result.role]} has {name} added {times + 1} times{over}",
        claimed=claimed_text(result),
    )


def mixed_shards(result: Compared) -> Finding | None:
    """Return the finding if each rank has the sum or mean of parts that are different parts of the tensor."""
    wanted = {rank: result.wanted_of(rank) for rank in result.reduced}
    for axis in result.mesh.axes:
        groups = [group for group in result.mesh.groups(axis) if all(rank in wanted for rank in group)]
        alike = all(len({wanted[rank].shape for rank in group}) == 1 for group in groups)
        if not groups or not alike or not splits(result, axis):
            continue
        for name, mixed in _mixtures(result, axis, wanted, groups):
            if set(mixed) == set(result.reduced) and all(_is_nearer(result, rank, mixed[rank]) for rank in mixed):
                return _of_mixed(result, axis, name)
    return None


def _is_nearer(result: Compared, rank: int, mixed: NDArray[np.float64]) -> bool:
    """Whether a rank has this, and is not merely as near to it as to what is wanted."""
    apart, off = (
        float(np.max(np.abs(result.reduced[rank] - due), initial=0.0)) for due in (mixed, result.wanted_of(rank))
    )
    return result.near(result.reduced[rank], mixed) and (rank not in result.wrong or apart <= off / 4)


def _mixtures(
    result: Compared, axis: str, wanted: Values, groups: list[tuple[int, ...]]
) -> Iterator[tuple[str, Values]]:
    """Yield what reductions over an axis make of its parts: of one a rank, or each counted once.

    A part that several ranks share is counted once if each of them had its own contribution to it.
    """
    yield "mean", result.over(axis, "avg", wanted)
    yield "sum", result.over(axis, "sum", wanted)
    once: Values = {}
    for group in groups:
        parts = {result.regions[rank]: wanted[rank] for rank in group}
        once |= dict.fromkeys(group, np.sum(list(parts.values()), axis=0))
    yield "sum", once
    yield "mean", {rank: values / len(group) for group in groups for rank, values in once.items() if rank in group}


def _of_mixed(result: Compared, axis: str, reduction: str) -> Finding:
    return MixedShards(axis).finding(
        result.name,
        result.wrong,
        f"every rank has the {reduction} over {axis} of all parts of the {WHAT[result.role]}, "
        "which are different parts",
        claimed=claimed_text(result),
    )


def _on_some_ranks(dump: Dump, result: Compared, right: list[int]) -> Cause:
    """Return the cause if some ranks are right: what they have and the others lack, if there is any."""
    lacking = [
        name
        for tensor in dump.at("initial")
        if tensor.role in WEIGHTS and set(right) <= set(tensor.shards) and not set(result.wrong) & set(tensor.shards)
        for name in tensor.names
    ]
    return WeightOnSomeRanks(result.wrong, lacking[0]) if lacking else RankDependentCode(result.wrong)
