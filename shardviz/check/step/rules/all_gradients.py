"""Findings of all gradients together: one factor, a factor of some, and their norm.

One factor for every gradient, beside a loss that is right, is of no reduction of a single tensor. What does that is a
backward of another loss than the one that is returned: a loss scale, micro-batches whose losses are not divided. What
all gradients come from, as the loss, cannot give a factor to a part: a part of one module, or all that an axis splits,
is where to look. Clipping to a round norm multiplies all gradients, too, and is not an error; clipping by a rank's own
norm gives each rank a number of its own, and stays a finding.

A norm over shards is the root of the sum of all squares, each counted once. Summed over an axis that keeps copies too,
it counts those once a rank (torchtune#2420); not summed over an axis that splits, it is a part's (RLinf#1558). Norms
of parts are not summed or averaged: only their squares add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.rules.factors import cause_of_axes, overs, size_clause
from shardviz.explain.step.losses import NormOfPart, StatisticOfParts
from shardviz.explain.step.scales import (
    ClippedByParts,
    NormOverWrongAxes,
    RoundedNumber,
    ScaledBackward,
    ScaledForward,
    ScaledReduction,
)
from shardviz.explain.templates import number, times_text
from shardviz.groups import in_groups
from shardviz.relate.factors import ratio_near
from shardviz.relate.measures import axis_sets, factor_of_all
from shardviz.relate.tolerance import (
    EPSILON,
    EXACT,
    EXPLAINED,
    FEW,
    LEAST_EXACT_FACTOR,
    SAFETY,
    SINGLE,
    least_factor,
    near_ratio,
)
from shardviz.relate.values import magnitude
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared, Found
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

MAX_LISTED = 4

MANY_ALIKE = 2
"""More gradients than this have no factor in common by chance."""

CLIP_EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by."""


def of_all_gradients(evidence: Evidence, pairs: Sequence[Found]) -> tuple[list[Found], list[Finding | NotChecked]]:
    """Return the findings left of a step, and one for all gradients together in place of the others."""
    all_alike = multiplied(evidence)
    if all_alike is None or _follows_output(evidence, pairs):
        return list(pairs), []
    of_results = [(result, finding) for result, finding in pairs if result.role != "grad"]
    if not all_alike.clipped_to:
        remaining = [pair for pair in of_results if evidence.loss_is_right or pair[0] is not evidence.loss]
        return remaining, [of_factor(evidence, all_alike.gradients, all_alike.factor)]
    why = (
        f"the size of the gradients: the step clips them to a norm of {number(all_alike.clipped_to)}, and the "
        f"unsharded step does not; they are right but for the factor {number(all_alike.factor)}; clip by "
        "torch.nn.utils.clip_grad_norm_, after the last backward, or in optimizer(model, mesh) to have it compared"
    )
    remaining = [pair for pair in of_results if not _is_clipped(pair[0], all_alike.factor)]
    return remaining, [NotChecked("", why, "step")]


def _follows_output(evidence: Evidence, pairs: Sequence[Found]) -> bool:
    """Whether an output is wrong and the loss with it, if only by what rounding to eight bits allows."""
    loss = evidence.loss
    is_off = loss is not None and loss.farthest > SINGLE * magnitude(loss.wanted)
    return is_off and any(result.role == "output" for result, _ in pairs)


def _is_clipped(comparison: Compared, factor: float) -> bool:
    """Whether a logged value is the norm of clipped gradients, or another number that is off by their factor."""
    is_times = all(comparison.near(values, factor * comparison.wanted) for values in comparison.reduced.values())
    return comparison.role == "scalar" and is_times


OF_LOSS = {"unseen": "the model's output is right, and the loss was not seen", "": "the loss is right"}
"""What is known of the loss if it isn't known to have the gradients' factor."""


def of_factor(evidence: Evidence, gradients: Sequence[Compared], factor: float, when: str = "") -> Finding:
    """Return the finding of gradients that all have a factor.

    Args:
        gradients: All of its gradients.
        when: The moment at which they have it, if that is not when they were recorded.
    """
    ratio = _ratio(evidence, gradients, factor)
    parted = {axis for gradient in gradients for axis in evidence.parted_along(gradient.name)}
    axes = overs(gradients, ratio, evidence.batch, parted) if ratio else []
    size = " or ".join(over.text for over in axes)
    of_runs = ratio_near(factor, evidence.num_runs, near_ratio(gradients[0].rounding.epsilon))
    of_runs = None if of_runs == 1 else of_runs
    exact, is_in_loss = ratio or of_runs or factor, _is_in_loss(evidence, factor)
    loss: Literal["", "unseen"] = "unseen" if evidence.loss is None else ""
    ranks = ranks_of(gradients, exact, evidence.num_runs) if loss else None
    of_backward: Cause = ScaledBackward(exact, evidence.num_runs or None, loss, ranks)
    if next((record.is_own_step is False for record in evidence.dump.files.ranks.values()), False):
        of_backward = ScaledReduction(exact, gradients[0].wrapped_over(gradients[0].mesh.axes) == "ddp")
    cause = (_clipped_by_another_norm(gradients) if 0 < factor < 1 else None) or of_backward
    if ratio and axes:
        cause = cause_of_axes(ratio, axes, of_all=True, or_else=cause)
    elif rounded := _rounded_number(evidence, factor):
        cause = rounded
    elif is_in_loss:
        cause = ScaledForward()
    first = gradients[0]
    finding = cause.finding(
        first.name,
        first.wrong or tuple(first.reduced),
        f"the gradient is {times_text(exact)} the unsharded model's{size_clause(ratio or Fraction(0), size)}",
        details=(*([when] if when else []), "the loss has this factor, too" if is_in_loss else OF_LOSS[loss]),
    ).seen_in(first)
    return finding if len(gradients) == 1 else of_all(finding, gradients)


def ranks_of(gradients: Sequence[Compared], factor: Fraction | float, runs: int) -> int | None:
    """Return how many ranks of some axes, times the number of micro-batches, are the factor; None if none are."""
    mesh = gradients[0].mesh
    sizes = {mesh.size_over(axes) for axes in axis_sets(mesh.long_axes)} if runs > 1 else set()
    return next((size for size in sizes if factor == size * runs), None)


def _is_in_loss(evidence: Evidence, factor: float) -> bool:
    """Whether the loss is off by this factor, too, by no more than rounding allows: it was not called wrong."""
    loss = evidence.loss
    factors = [float(held) / float(loss.wanted) for held in loss.reduced.values()] if loss and loss.wanted else []
    return bool(factors) and all(abs(own - factor) <= EXPLAINED * abs(factor - 1) for own in factors)


def _rounded_number(evidence: Evidence, factor: float) -> Cause | None:
    """Return the cause if one number that makes the loss is summed in a dtype that rounds it by as much."""
    for record in evidence.dump.files.ranks.values():
        for reduction in record.reductions:
            epsilon = EPSILON.get(reduction.dtype, 0.0)
            if reduction.size < FEW and epsilon > EPSILON["float32"] and abs(factor - 1) <= epsilon:
                return RoundedNumber(reduction.dtype, reduction.axes)
    return None


def of_all(finding: Finding, gradients: Sequence[Compared]) -> Finding:
    """Return the finding of one gradient as that of the whole run, with each gradient's own in it."""
    every = "both" if len(gradients) == 2 else f"all {len(gradients):,}"
    return replace(
        finding,
        tensor="",
        ranks=tuple(sorted({rank for gradient in gradients for rank in gradient.wrong or gradient.reduced})),
        sentence=finding.sentence.replace("the gradient is", f"{every} gradients are", 1),
        pairs=tuple(gradients),
        members=tuple(
            replace(finding, tensor=gradient.name, ranks=gradient.wrong or tuple(gradient.reduced), pairs=(gradient,))
            for gradient in gradients
        ),
    )


def _clipped_by_another_norm(gradients: Sequence[Compared]) -> Cause | None:
    """Return the cause if clipping made a norm of parts a round number; None if it didn't."""
    for what, norm, axes in norms_of_parts(list(gradients)):
        rounded = round_norm(1.0, norm, nearness(gradients))
        if rounded and not math.isclose(norm, total(gradient.wanted for gradient in gradients)):
            return norm_over(axes, gradients) or ClippedByParts(what, rounded)
    return None


def norm_over(axes: Sequence[str], gradients: Sequence[Compared]) -> NormOverWrongAxes | None:
    """Return the cause if a sum of squares over axes counts copies of a gradient; None if there are none."""
    copies = ((one.name, axis) for one in gradients for axis in one.mesh.axes if not one.is_split(axis))
    copied = next(((name, axis) for name, axis in copies if axis in axes), None)
    return NormOverWrongAxes(*copied, "", "") if copied else None


@dataclass(frozen=True, slots=True)
class Multiplied:
    """What the gradients of a step have in common.

    Attributes:
        gradients: The gradients, which are the unsharded model's but for the factor.
        factor: The number that every rank's part of every one is multiplied by.
        clipped_to: The round norm that they were clipped to; 0 if that is not what multiplied them.
    """

    gradients: tuple[Compared, ...]
    factor: float
    clipped_to: float


def multiplied(evidence: Evidence) -> Multiplied | None:
    """Return the factor of all gradients if the loss is right, or has it too; None if they share none."""
    gradients = tuple(gradient for gradient in evidence.gradients.values() if np.any(gradient.wanted) or gradient.wrong)
    has_size = any(gradient.wrong or not (gradient.noise and gradient.is_lost) for gradient in gradients)
    factor = _factor(evidence, gradients) if has_size else None  # noise has some factor, too
    if factor is not None and not evidence.loss_is_right and not _has_loss_alone(evidence, gradients, factor):
        return None
    return None if factor is None else Multiplied(gradients, factor, _clipped_to(evidence, gradients, factor))


def _has_loss_alone(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> bool:
    """Whether a wrong loss has a factor that is no size of the mesh, and what it is computed from is right."""
    loss = evidence.loss
    has_wrong_output = any(output.wrong for output in evidence.outputs)
    if loss is None or has_wrong_output or _ratio(evidence, gradients, factor) is not None:
        return False
    return all(loss.near(values, factor * loss.wanted) for values in loss.reduced.values())


def round_norm(factor: float, norm: float, near: float) -> float:
    """Return the number of two digits that a norm is after it was multiplied; 0 if it is none.

    Args:
        factor: What it was multiplied by, which may have divided by the norm and an epsilon.
        near: How far the number may be off, relative to it.
    """
    for product in (factor * norm, factor * (norm + CLIP_EPSILON)):
        rounded = float(f"{product:.1e}")
        if near < SINGLE * 10 and product and abs(product - rounded) <= near * rounded:
            return rounded
    return 0.0


def nearness(gradients: Sequence[Compared]) -> float:
    """Return how far a norm of gradients may be off by rounding, relative to it."""
    return max(EXACT, SAFETY * max(gradient.rounding.epsilon for gradient in gradients))


def _factor(evidence: Evidence, gradients: Sequence[Compared]) -> float | None:
    factor = factor_of_all(gradients)
    num_known = sum(np.count_nonzero(gradient.wanted_of(rank)) for gradient in gradients for rank in gradient.reduced)
    if factor is None or num_known <= 1:
        return None
    # Rounding of each result leaves no single factor that fits all of them to the last digits.
    is_shared = _is_shared(evidence, gradients, factor)
    least = LEAST_EXACT_FACTOR if is_shared else least_factor(gradients[0].rounding.epsilon)
    return factor if abs(factor - 1) >= least else None


def _ratio(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> Fraction | None:
    """Return the ratio of small numbers that a factor is, as near as the gradients tell it."""
    near = SINGLE if _is_shared(evidence, gradients, factor) else near_ratio(gradients[0].rounding.epsilon)
    return ratio_near(factor, gradients[0].mesh.size, near)


def _is_shared(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> bool:
    """Whether all gradients have a factor as precisely as float32 has numbers, and the loss has it or is right."""
    loss = evidence.loss
    if loss is None or not (_has_exactly(loss, factor) or (evidence.loss_is_right and len(gradients) > MANY_ALIKE)):
        return False
    return all(_has_exactly(gradient, factor) for gradient in gradients)


def _has_exactly(result: Compared, factor: float) -> bool:
    """Whether a result is the unsharded model's times a factor on every rank, but for float32's rounding."""
    sides = [(held, result.wanted_of(rank)) for rank, held in result.reduced.items()]
    return all(magnitude(held - factor * expected) <= SINGLE * magnitude(expected) for held, expected in sides)


def _clipped_to(evidence: Evidence, gradients: Sequence[Compared], factor: float) -> float:
    """Return the round norm that gradients were clipped to; 0 if they were not."""
    if not 0 < factor < 1:
        return 0.0
    near, tied = nearness(gradients), {gradient.name: evidence.tied_to(gradient.name) for gradient in gradients}
    distinct = [one for one in gradients if not any(name < one.name for name in tied[one.name])]
    norms = [total(gradient.wanted for gradient in some) for some in (gradients, distinct)]
    return next((rounded for norm in norms if (rounded := round_norm(factor, norm, near))), 0.0)


@dataclass(frozen=True)
class Part:
    """The gradients of a step that have a factor, and the others.

    Attributes:
        have: Those that have it.
        others: Those that have not, zeros left out, which have any.
    """

    have: tuple[Compared, ...]
    others: tuple[Compared, ...]

    @property
    def is_all(self) -> bool:
        """Whether all gradients have it."""
        return not self.others

    @property
    def is_beside_right(self) -> bool:
        """Whether any other gradient is right, so that nothing that all come from is wrong."""
        return any(not gradient.wrong for gradient in self.others)

    @cached_property
    def text(self) -> str:
        """How many gradients have the factor, and what only they share; empty if all have it."""
        if self.is_all:
            return ""
        names = {gradient.name for gradient in self.have}
        common = [text for text, those in self._traits() if {gradient.name for gradient in those} == names]
        which = " and ".join(common) or listed((gradient.name for gradient in self.have), MAX_LISTED)
        have = "has" if len(self.have) == 1 else "have"
        return f"{len(self.have):,} of {len(self.have) + len(self.others):,} gradients {have} this factor: {which}"

    def _traits(self) -> Iterator[tuple[str, list[Compared]]]:
        """Yield traits that gradients may share, each with the gradients that have it."""
        every = (*self.have, *self.others)
        if inside := _module_of(self.have):
            yield f"all those of {inside}", [gradient for gradient in every if gradient.name.startswith(f"{inside}.")]
        last = self.have[0].name.rpartition(".")[2]
        yield f"all those named {last}", [gradient for gradient in every if gradient.name.rpartition(".")[2] == last]
        for axis in self.have[0].mesh.axes:
            yield f"all that {axis} splits", [gradient for gradient in every if gradient.is_split(axis)]
            yield f"all that only some ranks along {axis} have", [one for one in every if not one.has_group(axis)]
            yield f"all that are whole along {axis}", [gradient for gradient in every if not gradient.is_split(axis)]
        yield "all plain tensors", [gradient for gradient in every if gradient.claimed is None]
        yield "all DTensors", [gradient for gradient in every if gradient.claimed is not None]


@dataclass(frozen=True)
class Parts:
    """The gradients of a step by the factor that they have; gradients of one factor share their part.

    Attributes:
        gradients: Every gradient of the step that can be compared.
        ratios: The factor of each, by name.
    """

    gradients: Sequence[Compared]
    ratios: Mapping[str, Fraction | None]

    def part_with(self, comparison: Compared) -> Part:
        """Return the gradients that have the factor that one of them has."""
        part = self._by_ratio.get(self.ratios.get(comparison.name))
        if part is not None:
            return part
        at = self._positions.get(comparison.name, len(self._known))
        return Part((comparison,), (*self._known[:at], *self._known[at + 1 :]))

    def _part(self, have: Sequence[Compared]) -> Part:
        names = {gradient.name for gradient in have}
        return Part(tuple(have), tuple(gradient for gradient in self._known if gradient.name not in names))

    @cached_property
    def _known(self) -> list[Compared]:
        return [gradient for gradient in self.gradients if np.any(gradient.wanted)]

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {gradient.name: position for position, gradient in enumerate(self._known)}

    @cached_property
    def _by_ratio(self) -> Mapping[Fraction | None, Part]:
        by_ratio = in_groups((self.ratios[gradient.name], gradient) for gradient in self._known)
        return {ratio: self._part(have) for ratio, have in by_ratio.items() if ratio is not None}


def _module_of(have: Sequence[Compared]) -> str:
    """Return the innermost module that all are in; empty if that is the model."""
    modules = [gradient.name.split(".")[:-1] for gradient in have]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in alike)


def check_norm(evidence: Evidence, comparison: Compared) -> Finding | None:
    """Return the finding if a value should be the norm of all gradients, and is put together in another way."""
    gradients = list(evidence.gradients.values())
    whole = np.array(total(gradient.wanted for gradient in gradients))
    if comparison.wanted.ndim or not gradients or not comparison.near(comparison.wanted, whole):
        return None
    squares = {rank: _square(gradients, rank) for rank in comparison.reduced}
    for axes in axis_sets(comparison.mesh.axes, 0):
        whole_squares = comparison.over(axes, "sum", squares)
        if comparison.is_held({rank: np.sqrt(square) for rank, square in whole_squares.items()}):
            copied = next(((name, axis) for axis in axes for name in _names(gradients, axis, split=False)), ("", ""))
            others = [axis for axis in comparison.mesh.axes if axis not in axes]
            missed = next(((name, axis) for axis in others for name in _names(gradients, axis)), ("", ""))
            over = f"summed over {' and '.join(axes)}" if axes else "not summed over any axis"
            sentence = f"the value is the norm of all gradients with the squares of each rank's {over}"
            return comparison.finding(NormOverWrongAxes(*copied, *missed), sentence)
    norms = {rank: np.sqrt(square) for rank, square in squares.items()}
    for axes in axis_sets(comparison.mesh.axes):
        means, over = comparison.over(axes, "avg", squares), " and ".join(axes)
        if comparison.is_held({rank: np.sqrt(square) for rank, square in means.items()}):
            way = f"the root of the mean over {over} of each rank's own sum of squares"
            cause = StatisticOfParts("norm", way, f"all_reduce the squares over {over} with ReduceOp.SUM instead")
            return comparison.finding(cause, f"the value is {way}; the norm of all gradients is the root of their sum")
        for op, name in (("avg", "mean"), ("sum", "sum")):
            if comparison.is_held(comparison.over(axes, op, norms)):
                what = f"the {name} over {over} of each rank's own norm"
                sentence = f"the value is {what}; the norm of all gradients is the root of the sum of all squares"
                return comparison.finding(NormOfPart(over, is_reduced=True), sentence, kind="wrong-scale")
    return None


def total(parts: Iterable[NDArray[np.float64]]) -> float:
    """Return the norm of all parts together."""
    return math.sqrt(sum(float(np.sum(part**2)) for part in parts))


def norms_of_parts(gradients: list[Compared]) -> Iterator[tuple[str, float, tuple[str, ...]]]:
    """Yield norms that are equal on all ranks, as sentences call them, with the axes over which squares are summed."""
    ranks = sorted({rank for gradient in gradients for rank in gradient.reduced})
    first = gradients[0]
    squares = {rank: _square(gradients, rank) for rank in ranks}
    roots = {rank: np.sqrt(square) for rank, square in squares.items()}
    for axes in axis_sets(first.mesh.axes):
        over = " and ".join(axes)
        ways = (("avg", "mean", roots), ("sum", "sum", roots), ("sum", "root of the sum of squares", squares))
        for op, name, values in ways:
            norms = [float(value) for value in first.over(axes, op, values).values()]
            norms = [math.sqrt(value) for value in norms] if values is squares else norms
            if norms and max(norms) - min(norms) <= EXACT * max(norms):
                yield f"the {name} over {over} of each rank's own", norms[0], axes if values is squares else ()


def _square(gradients: Sequence[Compared], rank: int) -> NDArray[np.float64]:
    """Return the sum of the squares of what a rank has."""
    squares = [float(np.sum(gradient.reduced[rank] ** 2)) for gradient in gradients if rank in gradient.reduced]
    return np.array(sum(squares))


def _names(gradients: list[Compared], axis: str, *, split: bool = True) -> Iterator[str]:
    """Yield the gradients that an axis splits, or those that it keeps copies of."""
    yield from (gradient.name for gradient in gradients if gradient.is_split(axis) == split)
