"""What no ratio explains: added vectors, mixed shards, one relation of all wrong ranks, statistics of a part.

A parameter may be added too often, shards summed as if they were copies, or one relation makes all wrong ranks' values
of those wanted; or only some ranks are right. If none of these fits, it is a `wrong-value`, with the place at which it
is off.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.rules.factors import size_in_words
from shardviz.check.step.rules.losses import cause_of_value, exponentials_of, unexplained_loss, unexplained_value
from shardviz.check.step.trace.backward import OUTPUT
from shardviz.dump.records.base import WEIGHTS
from shardviz.explain.changed import AddedNumber, OnlyZerosThere, RoundedResult, TransposedResult
from shardviz.explain.gradients import CutGraph
from shardviz.explain.modules import StatisticsOfPart
from shardviz.explain.step import (
    RankDependentCode,
    UnexplainedBackward,
    UnexplainedCopies,
    UnexplainedForward,
    WeightOnSomeRanks,
)
from shardviz.explain.sums import MixedShards, RepeatedTerm, TermLeftOut
from shardviz.explain.templates import number
from shardviz.layout.region import index_of
from shardviz.relate.measures import factor_of_all, factors_of_slices, mixed_over, vector_added
from shardviz.relate.relations import Filled, Offset, Rounded, Transposed
from shardviz.relate.tolerance import FEW, LEAST_STATISTIC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.relate.relations import Relation


def check_terms(evidence: Evidence, result: Compared) -> Finding:
    """Return the finding of a tensor that is off by no ratio."""
    dump = evidence.dump
    rank = result.wrong[0]
    excess = result.reduced[rank] - result.wanted_of(rank)
    found = added_too_often(dump, result) or mixed_shards(result)
    if found is not None:
        return found
    cause = cause_of_value(evidence, result) or _where_to_look(evidence, result)
    right = [rank for rank in result.reduced if rank not in result.wrong]
    is_on_some_ranks = bool(result.copies_differ_along and right)
    if is_on_some_ranks:
        cause = _on_some_ranks(dump, result, right)
    elif result.copies_differ_along:
        cause = UnexplainedCopies(" and ".join(result.copies_differ_along), cause)
    return result.finding(cause, _where(result, rank, excess), kind="wrong-value", generic=not is_on_some_ranks)


def _where_to_look(evidence: Evidence, result: Compared) -> Cause:
    """Return the place of a wrong result that no rule explains, as its cause."""
    if result.role == "output" or not evidence.outputs_are_right:
        return UnexplainedForward()
    if result.role == "scalar":
        return unexplained_value(evidence, result)
    return _in_backward(evidence) if evidence.loss_is_right else unexplained_loss(evidence)


def _in_backward(evidence: Evidence) -> Cause:
    cut = evidence.without_gradient
    is_of_loss = any(call.is_bad(OUTPUT) for call in evidence.calls.by_module.get("", ()))
    moves = {move for record in evidence.dump.files.ranks.values() for move in record.moves}
    if cut or len(moves) != 1:
        return CutGraph(cut) if cut else UnexplainedBackward(is_of_loss)
    (move,) = moves
    return UnexplainedBackward(is_of_loss, move.op, move.place)


def added_too_often(dump: Dump, result: Compared) -> Finding | None:
    """Return the finding if a vector of the model was added to every row too often, or not at all."""
    names, vectors = dump.vectors(result.reduced[result.wrong[0]].shape[-1:])
    added = vector_added(result, vectors) if names else None
    if added is None:
        return None
    name, times = names[added[0]], added[1]
    axes = size_in_words(result.mesh, Fraction(times + 1)) if times > 0 else ""
    over = f", once on every rank of {axes}" if axes else ""
    cause: Cause = RepeatedTerm(name, axes) if times > 0 else TermLeftOut(name)
    sentence = f"the {result.what} has {name} added {times + 1} times{over}"
    return replace(result.finding(cause, sentence), tensor=name)


def _not_finite(result: Compared, rank: int) -> str:
    """Say how many values are NaN or infinite although the wanted ones are finite, and which comes first."""
    values, what = result.reduced[rank], result.what
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
    text = f"the {result.what} is off by up to {number(worst)} on rank {rank} (largest value {number(size)}, "
    text += f"rounding allows {number(result.tolerance)})"
    if excess.ndim and len(off):
        at = int(result.regions[rank].flat_ids(result.wanted.shape).ravel()[off[0]])
        text += f": {len(off):,} of {excess.size:,} elements, the first at {index_of(at, result.wanted.shape)}"
    return text


def mixed_shards(result: Compared) -> Finding | None:
    """Return the finding if each rank has the sum or mean of parts that are different parts of the tensor."""
    mixed = mixed_over(result)
    if mixed is None:
        return None
    axis, kind = mixed
    parts = f"all parts of the {result.what}, which are different parts"
    return result.finding(MixedShards(axis), f"every rank has the {kind} over {axis} of {parts}")


def _on_some_ranks(dump: Dump, result: Compared, right: list[int]) -> Cause:
    """Return the cause if some ranks are right: what they have and the others lack, if there is any."""
    lacking = [
        name
        for tensor in dump.at("initial")
        if tensor.role in WEIGHTS and set(right) <= set(tensor.shards) and not set(result.wrong) & set(tensor.shards)
        for name in tensor.names
    ]
    return WeightOnSomeRanks(result.wrong, lacking[0]) if lacking else RankDependentCode(result.wrong)


def check_related(result: Compared) -> Finding | None:
    """Return the finding if all wrong ranks have what is wanted but for the same one relation."""
    if result.role == "scalar" or any(result.values[rank].size <= FEW for rank in result.wrong):
        return None  # fewer numbers are some other relation by chance
    link = _shared(result)
    cause = _cause(result, link) if link is not None else None
    if link is None or cause is None:
        return None
    return result.finding(cause, f"the {result.what} is {_text(result, link)}")


def _shared(result: Compared) -> Relation | None:
    """Return the only relation of all wrong ranks; None if they have none, several, or not the same."""
    chains = {result.changes_of(rank) for rank in result.wrong}
    links = chains.pop() if len(chains) == 1 else None
    return links[0] if links is not None and len(links) == 1 else None


def _cause(result: Compared, link: Relation) -> Cause | None:
    of_all = set(result.wrong) == set(result.reduced)
    if isinstance(link, Offset):
        return exponentials_of(result, link.number) or AddedNumber(link.number, result.wrong, of_all)
    if isinstance(link, Filled) and not link.value and result.role == "output":
        return OnlyZerosThere(result.wrong, of_all)
    if isinstance(link, Rounded) and factor_of_all([result], result.wrong) is None:
        return RoundedResult(link.dtype)
    return TransposedResult(link.dims) if isinstance(link, Transposed) else None


def _text(result: Compared, link: Relation) -> str:
    if isinstance(link, Offset):
        return f"{result.whose} {'plus' if link.number > 0 else 'minus'} {number(abs(link.number))}"
    if isinstance(link, Filled):
        largest = max(abs(float(result.wanted.max())), abs(float(result.wanted.min())), math.ulp(0.0))
        return f"0 in every element, and the largest of {result.whose} is {number(largest)}"
    if isinstance(link, Rounded):
        return f"{result.whose} rounded to {link.dtype}"
    return f"{result.whose} with its dims in another order"


def check_own_statistics(result: Compared) -> Finding | None:
    """Return the finding if values are the unsharded model's times a number plus a number, those of each slice."""
    if result.role != "output":
        return None
    for dims in _kept(result.wanted.ndim):
        axes = [axis for axis in result.mesh.axes if _splits(result, axis, dims)]
        factors = [factors_of_slices(result, rank, dims) for rank in result.wrong] if axes else []
        if factors and all(own is not None for own in factors):
            joined = np.concatenate([own for own in factors if own is not None])
            if float(joined.max() - joined.min()) > LEAST_STATISTIC:
                return _of_statistics(result, dims, " and ".join(axes))
    return None


def _kept(ndim: int) -> Iterator[tuple[int, ...]]:
    """Yield the dims whose indices share numbers: all but the features, as of a norm of rows; channels alone."""
    if ndim > 1:
        yield tuple(range(ndim - 1))
        yield (1,)
        yield (ndim - 1,)


def _of_statistics(result: Compared, dims: tuple[int, ...], axes: str) -> Finding:
    per = "row" if len(dims) > 1 else f"index of dim {dims[0]}"
    which = f"on each rank every {per} of the {result.what}"
    return result.finding(
        StatisticsOfPart(axes), f"{which} is the unsharded model's with a different factor and offset"
    )


def _splits(result: Compared, axis: str, kept: tuple[int, ...]) -> bool:
    """Whether an axis splits a dim that the numbers are taken over."""
    chains = result.claimed.chains if result.claimed is not None else ()
    return any(axis in chain for dim, chain in enumerate(chains) if dim not in kept)
