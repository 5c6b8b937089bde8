"""What two jobs' models make of the same rows in later steps, and copies of weights that the steps took apart.

A step that agrees shows nothing of what is wrong only later: gradients that are not zeroed, a schedule, a buffer or an
average that is read steps after it was written. Weights of right jobs drift apart by rounding, and most where nothing
depends on them; what a model makes of a row does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.departure import Departure, departure_for
from shardviz.check.step.jobs.other_steps import other_length, steps_of
from shardviz.check.step.jobs.starts import coarsest_of
from shardviz.check.step.trace.traces import largest_of
from shardviz.explain.step.sums import GradientNotReduced
from shardviz.explain.step.two_jobs import GradientsNotZeroed, OtherLaterOutputs
from shardviz.explain.step.update import CopiesSteppedApart
from shardviz.relate.factors import pairs_along
from shardviz.relate.tolerance import EPSILON, LATER_OUTPUT
from shardviz.relate.values import farthest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardviz.check.step.departure import Departure
    from shardviz.check.step.jobs.other_steps import Steps
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Kept, Weight
    from shardviz.dump.records.step import GivenRecord
    from shardviz.explain.finding import Finding


FEWEST = 2
"""Rows of a step that both jobs must have."""


def later_outputs_of(reference: WholeJob, job: WholeJob) -> tuple[Departure | None, int]:
    """Return the first later step with other outputs of the same rows, and how many later steps agree in them.

    Most rows of the step must have another one: a router that chooses between two nearly equal experts changes a few.
    Where the traced step's outputs differ, as with dropout or statistics of own rows, nothing is compared.
    """
    wanted, given = steps_of(reference), steps_of(job)
    allowed = LATER_OUTPUT[EPSILON[coarsest_of((reference, job))] > EPSILON["float32"]]
    agreeing: list[int] = []
    for at, (there, here) in enumerate(zip(wanted, given, strict=False)):
        if any(record.is_of_new_model for step in (there, here) for record in step.values()):
            break
        number, apart = job.steps_before + 1 + at, sorted(_apart(there, here))
        if len(apart) < FEWEST:
            continue
        if not agreeing and (at or apart[-1] > allowed):
            break
        if apart[len(apart) // 2] > allowed:
            off = sum(each > allowed for each in apart)
            sentence = (
                f"{job.name}: in step {number} the model makes other outputs of {off} of the {len(apart)} rows that "
                f"both jobs have, off by up to {100 * apart[-1]:.2g}% of their size; they agree in step {agreeing[-1]}"
            )
            lengths = (other_length(wanted, given, step, number - at) for step in range(1, at + 1))
            cause = (
                _of_gradients((wanted, given), at, number - at)
                or next(filter(None, lengths), None)
                or OtherLaterOutputs(agreeing[-1], number, is_traced=len(agreeing) == 1)
            )
            return departure_for(cause, "sharded", "", sentence), len(agreeing) - 1
        agreeing.append(number)
    return None, max(len(agreeing) - 1, 0)


def _of_gradients(steps: tuple[Steps, Steps], last: int, first: int) -> GradientsNotZeroed | None:
    """Return that a job begins a later step, up to the last, with gradients that the other job has none of."""
    for at in range(1, last + 1):
        there, here = (max(record.kept_gradients for record in of_job[at].values()) for of_job in steps)
        if here and not there:
            return GradientsNotZeroed(here, first + at)
    return None


def _apart(wanted: Mapping[int, GivenRecord], given: Mapping[int, GivenRecord]) -> Iterator[float]:
    """Yield how far each row's output is off, relative to its size; rows that one job alone has are left out."""
    known = {key: (total, size) for key, total, size in _outputs(wanted)}
    for key, total, size in _outputs(given):
        if key in known:
            other, other_size = known[key]
            yield abs(total - other) / (max(size, other_size) or 1.0)


def _outputs(step: Mapping[int, GivenRecord]) -> Iterable[tuple[int, float, float]]:
    return (output for record in step.values() for output in record.outputs)


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
        held, made = _kept_values(before[name]), _kept_values(after[name] | then.get(name, {}))
        split = {axis for part in before[name].values() if part.layout for axis in part.layout.split_axes}
        axes = [axis for axis in job.mesh.long_axes if _are_copies(held, axis, job) and _are_apart(made, axis, job)]
        axes = [axis for axis in axes if axis not in split]
        if not axes or any(np.ptp(values.values) == 0 for values in held.values()):
            continue
        is_reduced = not _are_apart(_kept_values(gradients.get(name, {})), axes[0], job)
        what = "the same gradient" if is_reduced else "other gradients"
        text = f"ranks along {axes[0]} have the same values before the traced step, {what}, and other values after it"
        if is_reduced:
            yield CopiesSteppedApart(axes[0]).finding(name, tuple(sorted(held)), text)
            continue
        wrapper: Literal["", "none"] = "" if job.wrappers else "none"
        yield GradientNotReduced((axes[0],), wrapper=wrapper).finding(name, tuple(sorted(held)), text)


def _kept_values(parts: Mapping[int, Weight]) -> dict[int, Kept]:
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
