"""What makes a loss wrong that is computed from right outputs, and what is logged of it or of the outputs.

A cross entropy over a vocabulary in shards adds up exponentials over ranks: an axis's size too many makes the loss too
large by its logarithm. Means of ranks' means are a candidate only if an axis splits the batch. A function of the
mean loss, as perplexity, is not the mean of the function.

What a training loop prints is of the whole batch and the whole model: the same on every rank. `.item()` of a DTensor
whose placement is Partial reads this rank's contribution and asks nobody (pytorch#144054).

A statistic of the outputs may be a norm, a deviation or a largest number. What the unsharded model logs says which one
of the whole output it is. What ranks log is that of their parts, or these are reduced in a way which does not make it
that of the whole: a mean of deviations, a sum of norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.step.comparison import Compared, whole_of
from shardviz.check.step.rules.factors import TORCH_OPS, Unreduced, own_part
from shardviz.dump.records.step import WHOLE_LOSS
from shardviz.explain.step.losses import (
    FunctionBeforeMean,
    LossNotReturned,
    MeanOfMeans,
    MiscountedExponentials,
    NormOfPart,
    OwnCountOfScalar,
    PaddingRead,
    PartialVocabularyLoss,
    ScalarNotReduced,
    ScalarOfPart,
    StatisticOfParts,
    TargetsOfOtherRows,
    UnexplainedLoss,
    UnexplainedValue,
)
from shardviz.explain.templates import number
from shardviz.relate.measures import Reduction, axis_sets, reduction_of
from shardviz.relate.tolerance import MOST_NOISE, SINGLE, TELLING
from shardviz.relate.values import magnitude
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]

MAX_LISTED = 4

FUNCTIONS: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "exp": np.exp,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "square": np.square,
    "1 / x": np.reciprocal,
    "exp2": np.exp2,
}
"""What a training loop logs of a loss: `exp` gives its perplexity."""

REDUCTIONS_OF_CROSS_ENTROPY = 3
"""The maximum, the sum of exponentials and the logit of the label."""

SMALL = 0.01
"""A logarithm is recognized by a loss that rounding leaves this much nearer to it than it is large."""


def is_loss(evidence: Evidence, comparison: Compared) -> bool:
    """Whether a logged value is meant to be the loss, which is a mean over the batch."""
    loss = evidence.loss
    if loss is None or comparison.wanted.shape != loss.wanted.shape:
        return False
    return comparison is loss or comparison.near(comparison.wanted, loss.wanted)


def cause_of_value(evidence: Evidence, comparison: Compared) -> Cause | None:
    """Return what makes a logged value wrong, of right outputs; None if nothing is known of it."""
    if comparison.role != "scalar" or not evidence.outputs_are_right:
        return None
    of_loss = _cause_of_loss(evidence, comparison) if comparison.name == "loss" else None
    batch = evidence.batch
    gradients = list(evidence.gradients.values())
    others = [axis for axis in batch or () if any(gradient.is_split(axis) for gradient in gradients)]
    others = [axis for axis in others if batch and not batch[axis] and _may_split_words(evidence, axis)]
    if of_loss or not batch or not others:
        return of_loss
    axes = " or ".join(others)
    of_words = PartialVocabularyLoss(axes, axes if _are_rows_reduced(evidence, others) else "")
    cause: Cause = of_words if comparison.name == "loss" else ScalarOfPart(axes, is_same_batch=True)
    if any(comparison.mesh.axis_size(axis) > 1 for axis in batch if axis not in others):
        return replace(unexplained_value(evidence, comparison), or_else=cause)
    return cause


def _cause_of_loss(evidence: Evidence, loss: Compared) -> Cause | None:
    """Return what makes a loss wrong, unless each rank reads a part of a vocabulary; None if nothing is known."""
    if _is_zero(evidence, loss):
        return LossNotReturned()
    excess = [float(np.ravel(values - loss.wanted)[0]) for values in loss.reduced.values()]
    is_one = max(excess) - min(excess) <= loss.tolerance
    if is_one and (logarithm := exponentials_of(loss, max(excess))) is not None:
        return logarithm
    rows = next((output.rows for output in evidence.results if output.rows), ())
    if rows:
        return TargetsOfOtherRows(*(listed(micro_batch, MAX_LISTED) for micro_batch in rows))
    padded = next((output for output in evidence.outputs if output.padded is not None), None)
    return (
        _of_padding(padded) if padded is not None else _counted_padding(evidence, loss, excess[0]) if is_one else None
    )


def _is_zero(evidence: Evidence, loss: Compared) -> bool:
    """Whether all ranks return 0 for a loss that is not, and every gradient is right."""
    is_wrong = any(gradient.wrong for gradient in evidence.gradients.values()) or not evidence.gradients
    return bool(np.any(loss.wanted)) and not is_wrong and not any(map(np.any, loss.reduced.values()))


def unexplained_value(evidence: Evidence, result: Compared) -> UnexplainedLoss | UnexplainedValue:
    """Return what is known of a logged value that is wrong although the outputs are right."""
    return unexplained_loss(evidence) if result.name == "loss" else UnexplainedValue()


def unexplained_loss(evidence: Evidence) -> UnexplainedLoss:
    """Explain a wrong loss of right outputs; reordered tokens suggest reordered labels."""
    modules = evidence.activations.by_name.values()
    reordered = next((module.name for module in modules if module.state == "moved"), "")
    records = evidence.dump.files.ranks.values()
    counted = (reduction for record in records for reduction in record.reductions if "int" in reduction.dtype)
    return UnexplainedLoss(reordered, next((" and ".join(reduction.axes) or "ranks" for reduction in counted), ""))


def _are_rows_reduced(evidence: Evidence, axes: Sequence[str]) -> bool:
    """Whether a rank reduces a number of each row three times over axes, as the parts of a cross entropy."""
    outputs = [output.wanted for output in evidence.outputs if output.wanted.size]
    rows = {wanted.size // wanted.shape[-1] for wanted in outputs if wanted.ndim}
    counts = [
        sum(
            reduction.count
            for reduction in record.reductions
            if "float" in reduction.dtype and reduction.size in rows and bool(set(reduction.axes) & set(axes))
        )
        for record in evidence.dump.files.ranks.values()
    ]
    return max(counts, default=0) >= REDUCTIONS_OF_CROSS_ENTROPY


def _counted_padding(evidence: Evidence, result: Compared, excess: float) -> Cause | None:
    """Return the cause of a cross entropy that counts the last words of right logits, and should leave them out."""
    for output in evidence.outputs:
        if output.wanted.ndim > 1 and np.isfinite(output.wanted).all():
            sums = np.logaddexp.accumulate(output.wanted, axis=-1).reshape(-1, output.wanted.shape[-1])
            due = np.mean(sums[:, -1:] - sums, axis=0)[:-1]
            near = np.flatnonzero(np.abs(due - excess) <= result.tolerance)
            if len(near) == 1 and excess > TELLING * result.tolerance:
                return PaddingRead(output.wanted.ndim - 1, int(near[0]) + 1, output.wanted.shape[-1])
    return None


def _of_padding(output: Compared) -> Cause:
    """Return the cause of a wrong loss of right outputs whose parts are padded to one size."""
    dim, size = output.padded or (0, 0)
    for axis in output.claimed.chains[dim] if output.claimed is not None else ():
        size *= output.mesh.axis_size(str(axis))
    return PaddingRead(dim, output.wanted.shape[dim], size)


def _may_split_words(evidence: Evidence, axis: str) -> bool:
    """Whether an axis splits the outputs, or a weight that has a row for each of their last dim, as a head has."""
    outputs = [output for output in evidence.outputs if output.wanted.ndim]
    words = {output.wanted.shape[-1] for output in outputs}
    heads = [
        gradient
        for gradient in evidence.gradients.values()
        if gradient.wanted.shape[:1] and gradient.wanted.shape[0] in words
    ]
    return not outputs or any(result.is_split(axis) for result in (*outputs, *heads))


def exponentials_of(comparison: Compared, excess: float) -> Cause | None:
    """Return the cause of values that are all too large by the logarithm of a number of ranks, or too small by it."""
    sizes = ((comparison.mesh.size_over(axes), " * ".join(axes)) for axes in axis_sets(comparison.mesh.axes))
    for size, axes in (pair for pair in sizes if pair[0] > 1):
        if comparison.tolerance < SMALL * math.log(size) and abs(abs(excess) - math.log(size)) <= comparison.tolerance:
            return MiscountedExponentials(size, axes, is_repeated=excess > 0)
    return None


def check_function(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if a logged value is the mean of a function of each rank's loss, not of the mean loss."""
    loss = evidence.loss
    batch = evidence.batch
    if loss is None or comparison is loss or comparison.wanted.ndim or not batch:
        return None
    axes = [axis for axis in batch if batch[axis]]
    for name, function in FUNCTIONS.items() if axes else ():
        with np.errstate(all="ignore"):  # the logarithm of a negative loss
            expected = function(loss.wanted)
            of_ranks = {rank: function(values) for rank, values in loss.values.items()}
        if comparison.near(comparison.wanted, expected) and comparison.is_held(comparison.over(axes, "avg", of_ranks)):
            over, value = " and ".join(axes), float(comparison.reduced[comparison.wrong[0]])
            mean = f"the mean over {over} of {name} of each rank's loss, {number(value)}"
            sentence = f"the value is {mean}; {name} of the mean loss is {number(float(comparison.wanted))}"
            return comparison.finding(FunctionBeforeMean(name, over), sentence)
    return None


def check_mean_of_means(evidence: Evidence) -> Iterator[Finding]:
    """Yield a warning if the ranks' losses have the mean that they should, and the whole batch's mean differs."""
    whole = whole_of(evidence.dump, "scalar", WHOLE_LOSS)
    loss = evidence.loss
    if whole is None or loss is None or loss.wrong:
        return
    mean, expected = float(loss.wanted), float(whole)
    yield mean_of_means(evidence.dump).finding(
        "loss",
        tuple(sorted(loss.values)),
        f"the mean of the ranks' losses is {mean:.6g}, and the unsharded model's loss of the whole batch is "
        f"{expected:.6g}, although all outputs are equal",
        severity="warning",
        details=("if a mean of the parts' means is meant, ignore this: gradients were compared with the mean's",),
    )


def mean_of_means(dump: Dump) -> MeanOfMeans:
    """Return the cause of a loss that is a mean of means, with the axes over which the step takes the mean."""
    loss = dump.find("step", "scalar", "loss")
    axes = [axis for axis, _ in loss.claimed.partial] if loss is not None and loss.claimed is not None else []
    return MeanOfMeans(" and ".join(axes), dump.files.mesh.size_over(axes) if axes else 0)


def check_scalar(comparison: Compared) -> Finding | None:
    """Return the finding if a scalar differs along an axis, and is not just wrong on some ranks."""
    missing = reduction_of(comparison)
    if not comparison.copies_differ_along or (missing is None and len(comparison.wrong) < len(comparison.reduced)):
        return None
    axes = " and ".join(missing[1] if missing else comparison.copies_differ_along)
    shown = listed(dict.fromkeys(number(float(values.sum())) for values in comparison.reduced.values()), MAX_LISTED)
    have, has = ("return the losses", "returns") if comparison.name == "loss" else ("log", "logs")
    finding = comparison.finding(
        _cause(missing[0] if missing else None, axes, comparison),
        f"ranks {have} {shown}; the unsharded model {has} {number(float(comparison.wanted.sum()))}",
        details=(f"their {missing[0]} over {axes} is the unsharded model's value",) if missing else (),
        held=own_part(*missing[:2]) if missing else "a value of each rank's own",
    )
    return finding.seen_in(Unreduced(comparison, *missing[:2])) if missing else finding


def _own_count(comparison: Compared) -> OwnCountOfScalar | None:
    """Return the cause if ranks divide the whole's sum by their own shares of a count, which add up to it."""
    wanted, mesh = float(comparison.wanted.sum()), comparison.mesh
    values = {rank: float(held.sum()) for rank, held in comparison.reduced.items()}
    if not set(mesh.ranks) <= values.keys() or not all(value and wanted / value > 0 for value in values.values()):
        return None
    for axis, is_root in product(comparison.copies_differ_along, (False, True)):
        ratios = {rank: wanted / value for rank, value in values.items()}
        shares = {rank: ratio * ratio if is_root else ratio for rank, ratio in ratios.items()}
        sums = [sum(shares[rank] for rank in group) for group in mesh.groups(axis)]
        if all(math.isclose(share, 1, rel_tol=SINGLE) for share in sums):
            return OwnCountOfScalar(axis, is_root)
    return None


def _cause(missing: Reduction | None, axes: str, comparison: Compared) -> Cause:
    """Return why ranks log different values, by the reduction that makes them right."""
    if missing is None:
        return _own_count(comparison) or ScalarOfPart(axes)
    if missing == "norm":
        return NormOfPart(axes)
    holders = [rank for rank, values in comparison.reduced.items() if np.any(values)]
    num_alike = comparison.mesh.axis_size(axes) if axes in comparison.mesh.axes else 0
    is_of_holders = missing == "sum" and len(holders) * num_alike == len(comparison.reduced)
    return ScalarNotReduced(axes, TORCH_OPS[missing], named_ranks(holders, MAX_LISTED) if is_of_holders else "")


MEANS = {"avg": "mean", "sum": "sum"}


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number that is made of all elements of a tensor.

    Attributes:
        name: What sentences call it.
        inner: What it is a function of.
        inner_name: What sentences call that; empty if it is the statistic itself.
        is_root: Whether the statistic is the root of that.
        remedy: How it is made of ranks' parts.
    """

    name: str
    inner: Callable[[Values], np.floating[Any]]
    inner_name: str
    is_root: bool
    remedy: str

    def of(self, inner: Values) -> Values:
        """Return the statistic, given what it is a function of."""
        return np.sqrt(inner) if self.is_root else inner


ROOT = "all_reduce the {} over {{axes}} with ReduceOp.{}, before the square root"
MOMENTS = (
    "all_reduce the number of elements, their sum and the sum of their squares over {axes}, and compute it of these"
)
STATISTICS = (
    Statistic("norm", lambda x: np.sum(x**2), "sum of squares", True, ROOT.format("squares", "SUM")),
    Statistic(
        "root mean square",
        lambda x: np.mean(x**2),
        "mean of squares",
        True,
        ROOT.format("means of squares", "AVG"),
    ),
    Statistic("standard deviation", lambda x: np.var(x, ddof=1), "variance", True, MOMENTS),
    Statistic("standard deviation", np.var, "variance", True, MOMENTS),
    Statistic("variance", lambda x: np.var(x, ddof=1), "", False, MOMENTS),
    Statistic("variance", np.var, "", False, MOMENTS),
    Statistic("largest element", np.max, "", False, "all_reduce it over {axes} with ReduceOp.MAX"),
    Statistic("smallest element", np.min, "", False, "all_reduce it over {axes} with ReduceOp.MIN"),
    Statistic(
        "largest magnitude", lambda x: np.max(np.abs(x)), "", False, "all_reduce it over {axes} with ReduceOp.MAX"
    ),
)


def check_statistic(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if a logged number should be a statistic of an output, and is made of that of the parts.

    An output that rounding may take anywhere may be wrong, and then the number that is made of it is.
    """
    outputs = [
        result
        for result in evidence.results
        if result.role == "output"
        and result.wanted.size > 1
        and result.tolerance <= MOST_NOISE * magnitude(result.wanted)
    ]
    for output, statistic in product(outputs if not comparison.wanted.ndim else (), STATISTICS):
        with np.errstate(all="ignore"):
            inner = {rank: np.array(statistic.inner(values)) for rank, values in output.reduced.items()}
            whole = statistic.of(np.array(statistic.inner(output.wanted)))
        split = [axis for axis in output.mesh.axes if output.is_split(axis)]
        if not comparison.near(comparison.wanted, whole):
            continue
        for way, values in _ways(statistic, comparison, inner):
            if comparison.is_held(values):
                axes = " and ".join(split) or "no axis"
                logs = f"the unsharded model logs the output's {statistic.name}, {number(float(whole))}"
                cause = StatisticOfParts(statistic.name, way, statistic.remedy.format(axes=axes))
                return comparison.finding(cause, f"the value is {way}; {logs}")
    return None


def _ways(
    statistic: Statistic, comparison: Compared, inner: Mapping[int, Values]
) -> Iterator[tuple[str, Mapping[int, Values]]]:
    """Yield how ranks may make a statistic of their parts, with what each of them has then."""
    with np.errstate(all="ignore"):
        of_parts = {rank: statistic.of(values) for rank, values in inner.items()}
        if statistic.name != "norm":
            yield f"the {statistic.name} of each rank's own part", of_parts
        for axes, (op, mean) in product(axis_sets(comparison.mesh.axes), MEANS.items()):
            over = f"the {mean} over {' and '.join(axes)}"
            yield f"{over} of each rank's own {statistic.name}", comparison.over(axes, op, of_parts)
            if statistic.is_root:
                reduced = comparison.over(axes, op, inner)
                yield (
                    f"the root of {over} of each rank's own {statistic.inner_name}",
                    {rank: np.sqrt(values) for rank, values in reduced.items()},
                )
