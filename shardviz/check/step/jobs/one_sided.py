"""Gradients, and weights, that only one of two jobs has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.departure import departure_for
from shardviz.check.step.trace.traces import largest_of
from shardviz.explain.step.gradients import ReductionSwitchedOff
from shardviz.explain.step.sums import GradientNotReduced
from shardviz.explain.step.two_jobs import OtherLaterOutputs, TrainedInOneJob
from shardviz.explain.step.update import CopiesSteppedApart
from shardviz.layout.mesh import ranks_by
from shardviz.relate.factors import pairs_along
from shardviz.relate.values import farthest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.check.step.departure import Departure
    from shardviz.check.step.jobs.starts import Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Kept, Weight
    from shardviz.explain.finding import Finding


def trained_in_one_job(weights: Weights, job: WholeJob) -> Iterator[Finding]:
    """Yield weights of which only this job has a gradient, if the other job has gradients of others."""
    for name, parts in job.weights("grad").items() if weights.grads else ():
        held = [rank for rank, part in parts.items() if part.values is not None and np.any(part.values.values)]
        if name in weights.params and name not in weights.grads and held:
            text = "it has a gradient, and the unsharded model's has none"
            yield TrainedInOneJob().finding(name, tuple(held), text)


def frozen_in_one_job(weights: Weights, job: WholeJob) -> Iterator[Finding]:
    """Yield weights of which only the other job has a gradient, if this job has gradients of others."""
    params, gradients = job.weights("param"), job.weights("grad")
    records = job.records.values()
    unknown = {name for record in records for name in (*record.held_back, *(name for name, _ in record.not_checked))}
    for name, whole in weights.grads.items() if gradients else ():
        is_due = whole.values is not None and bool(np.any(whole.values.values))
        if is_due and name in params and name not in gradients and name not in unknown:
            text = "no rank has a gradient of it when the optimizer steps, and the unsharded model has"
            yield TrainedInOneJob(is_absent=True).finding(name, tuple(params[name]), text)


def held_back_gradients(weights: Weights, job: WholeJob) -> Iterator[Finding]:
    """Yield weights that a job's optimizer steps without a gradient, because FSDP holds it back."""
    params, gradients = job.weights("param"), job.weights("grad")
    files = job.dump.files
    ranks_of = ranks_by((rank, name) for rank, record in files.ranks.items() for name in record.held_back)
    for name in (name for name in weights.grads if name in ranks_of and name in params and name not in gradients):
        text = "the optimizer steps while .grad is None on every rank: FSDP holds the gradient back"
        yield ReductionSwitchedOff().finding(name, tuple(ranks_of[name]), text)


def with_copies_apart(departure: Departure, reference: WholeJob, job: WholeJob) -> Departure:
    """Return wrong outputs of a later step with the weights that the steps took apart, if nothing else explains them.

    A program that fuses weights, or renames them, has gradients of its own to reduce. Weights that begin with equal
    values may be copies; if outputs go wrong after they were stepped apart, they are.
    """
    is_open = isinstance(departure.explanation, OtherLaterOutputs)
    apart = next(_copies_apart(reference, job), None) if is_open else None
    if apart is None:
        return departure
    sentence = f"{departure.sentence}; of {apart.tensor} {apart.sentence}"
    return departure_for(apart.explanation, departure.kind, apart.tensor, sentence)


def _copies_apart(reference: WholeJob, job: WholeJob) -> Iterator[Finding]:
    """Yield weights of other names than the other job's that ranks hold alike before the step, and not after it."""
    before, gradients, after = job.weights("param"), job.weights("grad"), job.weights("param", "updated")
    known, then = reference.weights("param"), job.weights("param", "next")
    for name in (name for name in after if name in before and name not in known):
        held, made = _values(before[name]), _values(after[name] | then.get(name, {}))
        split = {axis for part in before[name].values() if part.layout for axis in part.layout.split_axes}
        axes = [axis for axis in job.mesh.long_axes if _are_copies(held, axis, job) and _are_apart(made, axis, job)]
        axes = [axis for axis in axes if axis not in split]
        if not axes or any(np.ptp(values.values) == 0 for values in held.values()):
            continue
        is_reduced = not _are_apart(_values(gradients.get(name, {})), axes[0], job)
        what = "the same gradient" if is_reduced else "other gradients"
        text = f"ranks along {axes[0]} have the same values before the traced step, {what}, and other values after it"
        if is_reduced:
            yield CopiesSteppedApart(axes[0]).finding(name, tuple(sorted(held)), text)
            continue
        wrapper: Literal["", "none"] = "" if job.wrappers else "none"
        yield GradientNotReduced((axes[0],), wrapper=wrapper).finding(name, tuple(sorted(held)), text)


def _values(parts: Mapping[int, Weight]) -> dict[int, Kept]:
    return {rank: part.values for rank, part in parts.items() if part.values is not None and part.values.values.size}


def _are_copies(held: Mapping[int, Kept], axis: str, job: WholeJob) -> bool:
    """Whether all ranks along an axis have the same."""
    pairs = list(pairs_along(axis, held, job.mesh))
    return bool(pairs) and all(np.array_equal(first.values, other.values) for first, other in pairs)


def _are_apart(held: Mapping[int, Kept], axis: str, job: WholeJob) -> bool:
    """Whether some ranks along an axis have other values than rounding explains."""
    return any(
        first.values.shape != other.values.shape
        or farthest(first.values, other.values) > first.tolerance * largest_of(first)
        for first, other in pairs_along(axis, held, job.mesh)
    )
