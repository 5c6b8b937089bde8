"""Why a weight differs after the step.

A weight's step is what the optimizer added to it. Every rank's step may be the unsharded one times a number, or differ
from it by a part of the weight itself, as weight decay does. Optimizers that are defined for whole matrices may have
run on each rank's part of one: they make a step orthogonal, give it a norm, or divide it by means along a dim, all of
which a part has, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from shardviz.check.step.comparison import Compared, Reason, compared, spans, weight_of, whole_of
from shardviz.check.step.rules.all_gradients import norm_over, norms_of_parts, total
from shardviz.explain.step.scales import ClippedByParts
from shardviz.explain.step.update import (
    AnotherDecay,
    AnotherLearningRate,
    RankDependentDecay,
    RankDependentStep,
    RemainderNotStepped,
    RepeatedStep,
    RowsOfPart,
    StepOfPart,
    StepSkippedByRank,
    TrainedThoughFrozen,
    UnexplainedWeight,
    WriteToGatheredCopy,
)
from shardviz.explain.templates import number
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import ALIKE, EXPLAINED_UPDATE, FEW, LEAST_SINGULAR
from shardviz.relate.values import magnitude
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment


MAX_LISTED = 4

NEAR_NORM = 0.02
"""How far a norm may be from what a factor shows, relative to what the factor is from 1."""

MAX_ROWS = 1 << 12
"""Of a weight with more rows no run of rows is looked for."""

MAX_MATRIX = 1 << 10
"""Rows and columns of a matrix whose singular values are looked at."""


def why_weight(evidence: Evidence, comparison: Compared) -> Reason | None:
    """Return why a weight differs after the step, if its step shows that."""
    dump = evidence.dump
    moments: tuple[Moment, ...] = ("step", "reference")
    has = [dump.find(moment, "grad", comparison.name) is not None for moment in moments]
    if has == [True, False]:
        return Reason(TrainedThoughFrozen(), "it has a gradient, and the unsharded model's has none")
    if any(comparison.name in record.written_gathered for record in dump.files.ranks.values()):
        return Reason(WriteToGatheredCopy(), "the step writes to its gathered copy, which reshard() frees")
    step = _step_of(dump, comparison)
    assert step is not None, "it was compared with what it was before"
    if not np.any(step.wanted) and (skipped := _not_skipped(dump, step)) is not None:
        return skipped
    factors = factors_of(step)
    if any(abs(factor - 1) > EXPLAINED_UPDATE for factor in factors.values()):
        return (
            _of_normed_parts(step)
            or _by_norms(evidence, comparison, step, factors)
            or _scaled(dump, comparison, factors)
        )
    if (rows := _rows_left(step)) is not None:
        return _by_own_index(dump, step, rows)
    return (
        _left_out(step)
        or _decayed(dump, comparison, step)
        or _of_orthogonal_parts(step)
        or _of_singular_vectors_of_parts(evidence, step)
        or _by_own_statistics(step)
        or _of_this_part(dump, comparison, step)
    )


def _not_skipped(dump: Dump, step: Compared) -> Reason | None:
    """Return that ranks step what the unsharded model's optimizer leaves as it is, as it does all weights."""
    trained = {name for tensor in dump.at("reference") if tensor.role == "grad" for name in tensor.names}
    if not all(trained <= set(record.not_due) for record in dump.files.ranks.values()):
        return None
    stepping = tuple(sorted(rank for rank, held in step.reduced.items() if np.any(held)))
    on_some = len(stepping) < len(step.reduced)
    sentence = f"{named_ranks(stepping, MAX_LISTED)} took{' the' if on_some else ' a'} step"
    return Reason(StepSkippedByRank(on_some), f"{sentence}; the unsharded model's optimizer leaves it out")


def unexplained_weight(evidence: Evidence, comparison: Compared, ranks: Collection[int]) -> UnexplainedWeight:
    """Return what is known of a weight that is wrong on some ranks and whose step no rule explains."""
    step = _step_of(evidence.dump, comparison)
    settings = dict.fromkeys(name for record in evidence.dump.files.ranks.values() for name in record.other_settings)
    assert step is not None, "it was compared with what it was before"
    count = sum(np.count_nonzero(step.wanted_of(rank)) for rank in step.reduced)
    few = f"{count}" if count < FEW else ""
    axes = [axis for axis in step.mesh.axes if step.is_split(axis)] if not few else []
    others = list(_other_weights(evidence.dump, comparison))
    is_of_matrices = (
        comparison.wanted.ndim > 1
        and len(ranks) == len(comparison.reduced)
        and not any(other.wrong for other in others if other.wanted.ndim < 2)
    )
    split_over = " and ".join(axes) if is_of_matrices else ""
    whole = [other for other in others if other.wanted.ndim > 1 and not any(map(other.is_split, other.mesh.axes))]
    only_split = bool(split_over and whole) and not any(other.wrong for other in whole)
    return UnexplainedWeight(listed(settings, MAX_LISTED), few, split_over, only_split)


def rows_of_part(dump: Dump, comparison: Compared) -> Reason | None:
    """Return that rows of a weight that are not stepped are picked by their index in each rank's part."""
    step = _step_of(dump, comparison)
    rows = _rows_left(step) if step is not None else None
    return _by_own_index(dump, step, rows) if step is not None and rows is not None else None


def _rows_left(step: Compared) -> dict[int, NDArray[np.bool_]] | None:
    """Return which rows of its part each rank does not step; None unless all others are right, and some are left."""
    left: dict[int, NDArray[np.bool_]] = {}
    for rank, held in step.reduced.items():
        wanted = step.wanted_of(rank)
        if held.shape != wanted.shape or held.ndim < 2:
            return None
        rows, due = (part.reshape(len(part), -1) for part in (held, wanted))
        left[rank] = np.asarray(~rows.any(axis=1))
        is_due = ~due.any(axis=1)
        is_right = (np.abs(rows - due) <= EXPLAINED_UPDATE * magnitude(step.wanted)).all(axis=1)
        if not np.all(is_right | (left[rank] != is_due)):
            return None
    return left if any(map(np.any, left.values())) else None


def _by_own_index(dump: Dump, step: Compared, left: Mapping[int, NDArray[np.bool_]]) -> Reason | None:
    """Return that rows are picked by their index in a rank's part, or by a wrong number of its first row.

    None if the unsharded model's optimizer steps every row, or ranks leave rows by another rule.
    """
    due: NDArray[np.bool_] = np.asarray(~step.wanted.reshape(len(step.wanted), -1).any(axis=1))
    indices = np.broadcast_to(np.arange(len(due)).reshape(-1, *[1] * (step.wanted.ndim - 1)), step.wanted.shape)
    if not due.any() or due.all():
        return None
    texts = []
    for rank, rows in left.items():
        is_due = step.wanted_of(rank).reshape(len(rows), -1).any(axis=1)
        numbers = step.part(indices, rank).reshape(len(rows), -1)[:, 0]
        not_stepped, stepped = numbers[rows & is_due], numbers[~rows & ~is_due]
        verbs = [f"does not step rows {spans(not_stepped)}"] if len(not_stepped) else []
        verbs += [f"steps rows {spans(stepped)}"] if len(stepped) else []
        texts += [f"rank {rank} {' and '.join(verbs)}"] if verbs else []
    is_by_index = all(np.array_equal(rows, due[: len(rows)]) for rows in left.values())
    if not is_by_index and not _are_runs(dump, step, due, left):
        return None
    sentence = f"{listed(texts, MAX_LISTED)}; the unsharded model's optimizer leaves rows {spans(np.flatnonzero(due))}"
    return Reason(RowsOfPart(spans(np.flatnonzero(due)), is_offset=not is_by_index), sentence)


def _are_runs(dump: Dump, step: Compared, due: NDArray[np.bool_], left: Mapping[int, NDArray[np.bool_]]) -> bool:
    """Whether each rank leaves rows as some run of the whole's rows is left; behind its ends none are left.

    A row without a gradient, such as that of a word which the batch hasn't, is left by any rule.
    """
    gradient = whole_of(dump, "grad", step.name)
    if gradient is None or gradient.shape != step.wanted.shape or len(due) > MAX_ROWS:
        return False
    is_known = gradient.reshape(len(due), -1).any(axis=1)
    rule = np.where(is_known, due.astype(np.int8), -1)
    known = np.broadcast_to(is_known.reshape(-1, *[1] * (step.wanted.ndim - 1)), step.wanted.shape)
    for rank, rows in left.items():
        runs = sliding_window_view(np.pad(rule, len(rows)), len(rows))
        is_open = ~step.part(known, rank).reshape(len(rows), -1)[:, 0] | (runs < 0)
        if not (is_open | (runs == rows)).all(axis=1).any():
            return False
    return True


def _left_out(step: Compared) -> Reason | None:
    """Return that no rank steps the last elements of a weight, fewer than there are ranks, and all others rightly."""
    if not step.reduced or any(held.shape != step.wanted.shape for held in step.reduced.values()):
        return None
    got = np.stack([held.ravel() for held in step.reduced.values()])
    expected = np.stack([step.wanted_of(rank).ravel() for rank in step.reduced])
    off = np.abs(got - expected) > EXPLAINED_UPDATE * np.max(np.abs(expected), initial=0.0)
    still, count = off.all(axis=0), int(np.count_nonzero(off[0]))
    is_end = 0 < count < min(still.size, step.mesh.size) and bool(still[-count:].all()) and not got[:, -count:].any()
    if not is_end or np.any(off != still):
        return None
    elements = "element" if count == 1 else f"{count:,} elements"
    sentence = f"no rank steps the last {elements} of its {still.size:,}, and all others are stepped as they should be"
    return Reason(RemainderNotStepped(), sentence)


def _by_norms(evidence: Evidence, comparison: Compared, step: Compared, factors: Mapping[int, float]) -> Reason | None:
    """Return that a step is scaled by the norm of a part instead of the whole, or by a norm of copies."""
    if len(set(map(number, factors.values()))) == 1 and not _are_of_own_gradients(evidence, factors):
        return by_norm_of_copies(list(evidence.gradients.values()), factors, "the optimizer's step of it")
    steps = f"ranks step it by other multiples of the unsharded model's step: {shown(factors)}"
    return by_own_norms(evidence, comparison, step.wanted, factors, steps)


def by_own_norms(
    evidence: Evidence, comparison: Compared, update: NDArray[np.float64], factors: Mapping[int, float], sentence: str
) -> Reason | None:
    """Return that what each rank's step or state is multiplied by is a norm of the rank's own part.

    Args:
        update: What the unsharded optimizer multiplies by a number, or any multiple of it.
        factors: By rank, the multiple of the unsharded model's.
        sentence: What says so.
    """
    if _are_of_own_gradients(evidence, factors):
        return Reason(
            ClippedByParts(), f"{sentence}, as the norms of each rank's own gradients differ from that of all"
        )
    if min(factors.values()) <= 0:
        return None
    weight = weight_of(comparison.role, comparison.name)
    gradient, before = (whole_of(evidence.dump, role, weight) for role in ("grad", "param"))
    if gradient is None or before is None or not gradient.size == before.size == update.size:
        return None
    of_weight, of_gradient, of_update = (_shares(comparison, whole, factors) for whole in (before, gradient, update))
    roots = {rank: math.sqrt(comparison.reduced[rank].size / update.size) for rank in factors}
    ways: dict[str, dict[int, float]] = {"the weight's norm": of_weight}
    for what, shares in {"gradient": of_gradient, "update": of_update}.items():
        if all(shares.values()):
            ways[f"the {what}'s norm"] = {rank: 1 / share for rank, share in shares.items()}
            ways[f"the ratio of the weight's and the {what}'s norm"] = {
                rank: of_weight[rank] / shares[rank] for rank in roots
            }
            ways[f"the {what}'s root mean square"] = {rank: roots[rank] / shares[rank] for rank in roots}
    errors = {norm: round(_error_of(ratios, factors), 1) for norm, ratios in ways.items()}
    norm = min(errors, key=errors.__getitem__)
    is_near = errors[norm] <= 1
    return Reason(StepOfPart(norm), f"{sentence}; {norm} of each rank's part gives these numbers") if is_near else None


def _error_of(ratios: Mapping[int, float], factors: Mapping[int, float]) -> float:
    """Return how far ratios are from factors, relative to what is allowed: earlier steps had other norms."""
    allowed = {rank: max(EXPLAINED_UPDATE * factor, NEAR_NORM * abs(factor - 1)) for rank, factor in factors.items()}
    return max(abs(ratios[rank] - factor) / allowed[rank] for rank, factor in factors.items())


def _are_of_own_gradients(evidence: Evidence, factors: Mapping[int, float]) -> bool:
    """Whether factors are the norm of all gradients divided by that of all of the rank's own."""
    gradients = list(evidence.gradients.values())
    whole = total(gradient.wanted for gradient in gradients)
    norms = {rank: total(of.reduced[rank] for of in gradients if rank in of.reduced) for rank in factors}
    return all(norms.values()) and all(_is_equal(factor, whole / norms[rank]) for rank, factor in factors.items())


def _shares(comparison: Compared, whole: NDArray[np.float64], factors: Mapping[int, float]) -> dict[int, float]:
    """Return the norm of each rank's part of an array, relative to that of the whole."""
    whole, size = whole.reshape(comparison.wanted.shape), float(np.linalg.norm(whole)) or 1.0
    return {rank: float(np.linalg.norm(comparison.part(whole, rank))) / size for rank in factors}


def by_norm_of_copies(gradients: Sequence[Compared], factors: Mapping[int, float], what_is: str) -> Reason | None:
    """Return that what an optimizer makes of all gradients is divided by a norm that isn't that of all gradients.

    Args:
        factors: By rank, the number by which it is multiplied, which is the same on all.
        what_is: What is multiplied, as sentences call it.
    """
    factor, whole = next(iter(factors.values())), total(gradient.wanted for gradient in gradients)
    norms = list(norms_of_parts(list(gradients))) if gradients else []
    for what, norm, axes in sorted(norms, key=lambda way: abs(factor * way[1] - whole)):  # several may be near
        if not norm or not _is_equal(factor, whole / norm) or _is_equal(norm, whole):
            continue
        times = f"{what_is} is {_times(factor)} the unsharded model's on every rank"
        cause = norm_over(axes, gradients) or ClippedByParts(what, factor * norm)
        return Reason(cause, f"{times}: the norm of all gradients divided by {what}")
    return None


def _scaled(dump: Dump, comparison: Compared, factors: Mapping[int, float]) -> Reason:
    """Return why every rank's step is a multiple of the unsharded model's, as other weights' steps say."""
    why = scaled(factors)
    settings = {setting for record in dump.files.ranks.values() for setting in record.other_settings}
    is_seen = any(setting.startswith("lr of group") for setting in settings)
    if isinstance(why.explanation, AnotherLearningRate) or (isinstance(why.explanation, RepeatedStep) and is_seen):
        return replace(why, explanation=AnotherLearningRate(is_seen))
    others = _other_weights(dump, comparison)
    if isinstance(why.explanation, RepeatedStep) and any(_is_stepped_once(dump, other) for other in others):
        return replace(why, explanation=replace(why.explanation, of_all=False))
    return why


def scaled(factors: Mapping[int, float]) -> Reason:
    """Return why every rank's step is a multiple of the unsharded model's."""
    low, high = min(factors.values()), max(factors.values())
    if high - low > EXPLAINED_UPDATE * max(abs(low), abs(high)):
        steps = f"ranks step it by other multiples of the unsharded model's step: {shown(factors)}"
        return Reason(RankDependentStep(), steps)
    whole = round(high)
    is_repeated = whole >= 2 and abs(high - whole) <= EXPLAINED_UPDATE * whole
    times = f"{whole} times" if is_repeated else _times(high)
    cause = RepeatedStep(whole) if is_repeated else AnotherLearningRate()
    return Reason(cause, f"the optimizer's step of it is {times} the unsharded model's on every rank")


def shown(factors: Mapping[int, float]) -> str:
    """Return each rank's factor, as sentences list them."""
    return listed((f"{_times(factor)} on rank {rank}" for rank, factor in factors.items()), MAX_LISTED)


def _times(factor: float) -> str:
    return "once" if number(factor) == "1" else f"{number(factor)} times"


def _decayed(dump: Dump, comparison: Compared, step: Compared) -> Reason | None:
    """Return the explanation if a step differs from the unsharded model's by one multiple of the weight."""
    start = whole_of(dump, "param", comparison.name)
    assert start is not None, "it was compared with what it was before"
    nothing = np.zeros(0)
    offs = [(step.reduced[rank] - step.wanted_of(rank)).ravel() for rank in comparison.wrong]
    off = np.concatenate([nothing, *offs])
    weights = np.concatenate([nothing, *(comparison.part(start, rank).ravel() for rank in comparison.wrong)])
    if np.count_nonzero(weights) < FEW or np.ptp(weights) <= EXPLAINED_UPDATE * magnitude(weights):
        return None
    factor = factor_to(off, weights)
    if not factor:
        return None
    times = f"its step differs from the unsharded model's by {number(factor)} times the weight itself"
    sentence = f"{times}: it is decayed {'more' if factor < 0 else 'less'}"
    if len(comparison.wrong) >= sum(1 for values in comparison.values.values() if values.size):
        return Reason(AnotherDecay(), sentence)
    ranks = named_ranks(comparison.wrong, MAX_LISTED)
    return Reason(RankDependentDecay(), f"on {ranks} {sentence} there, and as it should be elsewhere")


def _of_orthogonal_parts(step: Compared) -> Reason | None:
    """Return that each rank's step is an orthogonal matrix of its own, which only the whole step should be."""
    parts = _parts_of(step).values()
    if not parts or not _is_orthogonal(step.wanted) or not all(_is_orthogonal(got) for got, _ in parts):
        return None
    return Reason(StepOfPart(), "each rank's step of it is an orthogonal matrix, as the whole step should be")


def _of_singular_vectors_of_parts(evidence: Evidence, step: Compared) -> Reason | None:
    """Return that each rank's step has the singular vectors of its part of the gradient, and should have the whole's.

    Muon and Shampoo change the singular values of a gradient and keep its vectors. A step S has those of a gradient G
    if both G S' and G' S are symmetric.
    """
    gradient = evidence.gradients.get(step.name)
    if step.wanted.ndim != 2 or gradient is None or gradient.wanted.shape != step.wanted.shape:
        return None
    parts = [(got, due, step.part(gradient.wanted, rank)) for rank, (got, due) in _parts_of(step).items()]
    is_of_parts = all(_has_vectors_of(own, got) for got, _, own in parts)
    if not parts or not is_of_parts or any(_has_vectors_of(own, due) for _, due, own in parts):
        return None
    if not _has_vectors_of(gradient.wanted, step.wanted):
        return None
    vectors = "each rank's step of it has the singular vectors of its own part of the gradient"
    return Reason(StepOfPart(), f"{vectors}, and the unsharded model's step has those of the whole gradient")


def _has_vectors_of(gradient: NDArray[np.float64], step: NDArray[np.float64]) -> bool:
    """Whether a step has the singular vectors of a gradient, except for what narrow numbers round."""
    if max(step.shape) > MAX_MATRIX or not np.isfinite(step).all() or not np.isfinite(gradient).all():
        return False
    products = (gradient @ step.T, gradient.T @ step)
    return all(np.linalg.norm(square - square.T) <= ALIKE * np.linalg.norm(square) for square in products)


def _by_own_statistics(step: Compared) -> Reason | None:
    """Return that a rank's step is scaled by numbers of its own, alike all along a split dim: means over its part."""
    parts = _parts_of(step).values()
    for dim, size in enumerate(step.wanted.shape if step.wanted.ndim > 1 else ()):
        if parts and all(1 < got.shape[dim] < size for got, _ in parts):
            first, *others = [_scales_across(got, due, dim) for got, due in parts]
            is_own = first is not None and any(scales is not None and not _is_near(first, scales) for scales in others)
            if is_own and all(scales is not None for scales in others):
                times = f"each rank multiplies the unsharded model's step by its own numbers, alike along dim {dim}"
                return Reason(StepOfPart(), f"{times}, such as means over its own part of that dim")
    return None


def _scales_across(got: NDArray[np.float64], expected: NDArray[np.float64], dim: int) -> NDArray[np.float64] | None:
    """Return factors, constant along a dim, between two arrays; None if they don't fit."""
    products, squares = (np.sum(side * expected, axis=dim, keepdims=True) for side in (got, expected))
    scales: NDArray[np.float64] = products / np.where(squares, squares, 1.0)
    return scales if _is_near(got, expected * scales) else None


def _of_this_part(dump: Dump, comparison: Compared, step: Compared) -> Reason | None:
    """Return that a split matrix is stepped differently, if the settings and another matrix's step are right."""
    has_settings = any(record.other_settings for record in dump.files.ranks.values())
    is_trained = dump.find("reference", "grad", comparison.name) is not None
    if comparison.wanted.ndim < 2 or has_settings or not is_trained or not _parts_of(step):
        return None
    right = next((other.name for other in _other_weights(dump, comparison) if _is_stepped_once(dump, other)), None)
    if right is None:
        return None
    return Reason(StepOfPart(), f"its step is no multiple of the unsharded model's, and the step of {right} is right")


def _of_normed_parts(step: Compared) -> Reason | None:
    """Return that each rank's step has the norm that the whole step should have."""
    norm = float(np.linalg.norm(step.wanted))
    norms = [(float(np.linalg.norm(got)), float(np.linalg.norm(due))) for got, due in _parts_of(step).values()]
    if not norm or not norms or not all(_is_equal(held, norm) and not _is_equal(due, norm) for held, due in norms):
        return None
    return Reason(StepOfPart(), f"each rank's step has the norm {number(norm)}, which the whole one should have")


def _parts_of(step: Compared) -> dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the step of each rank's part and the due one, of parts that are neither empty nor the whole."""
    parts = {rank: (got, step.wanted_of(rank)) for rank, got in step.reduced.items()}
    return {rank: (got, due) for rank, (got, due) in parts.items() if 0 < got.size < step.wanted.size}


def _is_orthogonal(step: NDArray[np.float64]) -> bool:
    """Whether the singular values of a matrix are alike, as Muon makes them."""
    if step.ndim != 2 or min(step.shape) < FEW or max(step.shape) > MAX_MATRIX or not np.isfinite(step).all():
        return False
    square = step @ step.T if step.shape[0] <= step.shape[1] else step.T @ step
    if np.linalg.norm(square - np.diag(np.diag(square))) > np.linalg.norm(square) * (1 - LEAST_SINGULAR):
        return False  # far from orthogonal, at a fraction of the cost
    sizes = np.linalg.svd(step, compute_uv=False)
    return bool(sizes[-1] >= LEAST_SINGULAR * sizes[0] > 0)


def _step_of(dump: Dump, comparison: Compared) -> Compared | None:
    """Return each rank's update of a weight, with the unsharded model's."""
    start, end = whole_of(dump, "param", comparison.name), whole_of(dump, "param", comparison.name, "updated")
    if start is None or end is None:
        return None
    held = {rank: values - comparison.part(start, rank) for rank, values in comparison.reduced.items()}
    return replace(comparison, claimed=None, wanted=(end - start).reshape(comparison.wanted.shape), values=held)


def factors_of_steps(dump: Dump, comparison: Compared) -> dict[int, float]:
    """Return the number of unsharded steps that each rank's step is; empty if some rank's is not such a multiple."""
    step = _step_of(dump, comparison)
    return factors_of(step) if step is not None else {}


def factors_of(step: Compared) -> dict[int, float]:
    """Return each rank's values as multiples of the expected ones; empty if some rank's are not such a multiple."""
    dues = {rank: step.wanted_of(rank) for rank in step.reduced}
    factors = {rank: factor_to(step.reduced[rank], due) for rank, due in dues.items() if np.any(due)}
    numbers = {rank: factor for rank, factor in factors.items() if factor is not None}
    is_enough = sum(map(np.count_nonzero, dues.values())) >= FEW
    return numbers if is_enough and len(numbers) == len(factors) else {}


def factor_to(got: NDArray[np.float64], expected: NDArray[np.float64]) -> float | None:
    """Return by what one array is a multiple of another; None if it is none."""
    factor = factor_of(got, expected)
    return factor if factor is not None and _is_near(got, factor * expected) else None


def _is_near(got: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    """Whether two arrays are near to each other, measured by the larger one."""
    size = max(magnitude(got), magnitude(expected))
    return magnitude(got - expected) <= EXPLAINED_UPDATE * size


def _is_equal(left: float, right: float) -> bool:
    """Whether two numbers are equal, as far as an update shows it."""
    return math.isclose(left, right, rel_tol=EXPLAINED_UPDATE)


def _other_weights(dump: Dump, result: Compared) -> Iterator[Compared]:
    """Yield the other weights of which both models' steps are known."""
    return (weight for weight in compared(dump, ("param",), reference="updated") if weight.name != result.name)


def _is_stepped_once(dump: Dump, comparison: Compared) -> bool:
    """Whether every rank steps a weight as the unsharded model does."""
    factors = {} if comparison.incomparable else factors_of_steps(dump, comparison)
    return bool(factors) and all(_is_equal(factor, 1.0) for factor in factors.values())
