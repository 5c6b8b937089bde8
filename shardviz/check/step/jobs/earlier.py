"""What the optimizer steps before the traced one made of two jobs' weights: rounding alone, or why they differ.

A step whose numbers are rounded to a narrow dtype gives two layouts other gradients in their last digits. Where a
gradient is nearly zero, Adam makes a whole update of its sign. So right jobs move apart by a part of what the steps
move, which the traced step shows; jobs with different gradients move apart by about all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.optimizers import RATE, Options, different_options, options_of
from shardviz.check.step.jobs.starts import by_name, in_region
from shardviz.check.step.trace.traces import coarsest_of
from shardviz.explain.step.two_jobs import DifferentSettings, EarlierStepsDiffer, StepsInNarrowDtype
from shardviz.groups import the_only
from shardviz.relate.casts import is_narrower
from shardviz.relate.tolerance import DRIFT_OF_STEPS, EPSILON
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.jobs.starts import Belonging, OtherWeight, Way
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Weight
    from shardviz.explain.cause import Cause


@dataclass(frozen=True, slots=True)
class Drift:
    """How far rounding in the steps before the traced one moved two jobs' weights apart.

    Attributes:
        num_weights: How many weights are apart.
        num_steps: The steps before.
        apart: How far an element is off at most, relative to the largest of its weight.
        dtype: The coarsest dtype in which the steps compute.
    """

    num_weights: int
    num_steps: int
    apart: float
    dtype: str

    @property
    def text(self) -> str:
        """What was not compared for it."""
        return (
            f"{counted(self.num_weights, 'weight')} before the step, and what the optimizer makes of them: the "
            f"{counted(self.num_steps, 'step')} before rounded to {self.dtype} and moved them apart, by up to "
            f"{100 * self.apart:.3g}% of a weight's largest element; {self.look}"
        )

    @property
    def look(self) -> str:
        """How to have them compared."""
        return "trace the first step too (--trace-step 1)"


def drift_of_steps(
    others: Sequence[OtherWeight],
    reference: WholeJob,
    job: WholeJob,
    ways: Mapping[str, Way],
    belongings: Mapping[str, Belonging],
) -> Drift | None:
    """Return how weights differ that narrow numbers moved apart in equal steps; None if more than that did.

    Args:
        others: The weights that differ.
        ways: How those of the first job are put together.
        belongings: Where parts of the second's belong that claim nothing.
    """
    steps, dtype = job.steps_before, coarsest_of((reference.job, job.job))
    are_alike = steps == reference.steps_before and not different_options(
        (options_of(reference), options_of(job)), (reference, job)
    )
    limits = DRIFT_OF_STEPS.get(dtype)
    if not steps or limits is None or not are_alike or any(other.has_relation for other in others):
        return None
    before, after = (by_name(job.job.ranks, "param", moment) for moment in ("step", "updated"))
    for other in others:
        whole = ways[other.name].weight
        far = moved = 0.0
        for rank, part in before[other.name].items():
            updated = after.get(other.name, {}).get(rank)
            pair = in_region(rank, whole, part, belongings.get(other.name))
            if pair is None or part.values is None or updated is None or updated.values is None:
                return None
            far += float(np.mean((pair[0] - pair[1]) ** 2))
            moved += float(np.mean((updated.values.values - part.values.values) ** 2))
        if not far <= (limits[len(whole.shape) > 1] * steps) ** 2 * moved:
            return None
    return Drift(len(others), steps, max(other.apart for other in others), dtype)


def cause_of_steps(
    others: Sequence[OtherWeight],
    params: Mapping[str, Weight],
    parts: Mapping[str, Mapping[int, Weight]],
    jobs: tuple[WholeJob, WholeJob],
    steps: int,
) -> Cause:
    """Return why so many steps before the traced one moved weights differently."""
    options = options_of(jobs[0]), options_of(jobs[1])
    if different := different_options(options, jobs):
        return DifferentSettings(different)
    rate = the_only({values[RATE] for of_job in options for values in of_job.values() if RATE in values})
    unknown = EarlierStepsDiffer(steps, rate if rate and all(options) else "")
    dtypes = _narrow_steps(params, parts, jobs, options)
    if dtypes is None:
        return unknown
    rounding = (steps + 1) * EPSILON[dtypes[0]] / 2
    is_rounding = all(weight.apart <= rounding for weight in others)
    return StepsInNarrowDtype(*dtypes, steps, None if is_rounding else unknown)


def _narrow_steps(
    params: Mapping[str, Weight],
    parts: Mapping[str, Mapping[int, Weight]],
    jobs: tuple[WholeJob, WholeJob],
    options: tuple[Options, Options],
) -> tuple[str, str, str] | None:
    """Return the dtypes of weights that one job's optimizer steps in fewer bits, and that job's name; else None.

    What an optimizer steps is in its groups: a copy in more bits has another name there.
    """
    for name, weight in params.items():
        shard = next(iter(parts.get(name, {}).values()), None)
        if shard is None or shard.values is None or weight.values is None:
            continue
        dtypes = weight.values.dtype, shard.values.dtype
        for at in (0, 1):
            narrow, wide = dtypes[at], dtypes[1 - at]
            if narrow != wide and is_narrower(narrow, wide) and name in options[at]:
                return narrow, wide, jobs[at].name
    return None
