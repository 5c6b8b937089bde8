"""What the optimizers of two jobs step with: options, and dtypes, if weights differ that earlier steps moved; norms.

Gradients of a job may be wrong because each rank clipped them by a norm of its own, as the job's trace says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.starts import by_name
from shardviz.explain.step.scales import ClippedByOwnNorms, ClippedByParts
from shardviz.explain.step.whole_step import (
    DifferentSettings,
    EarlierStepsDiffer,
    StepsInNarrowDtype,
    UnexplainedBackward,
)
from shardviz.explain.templates import number
from shardviz.relate.casts import is_narrower
from shardviz.relate.tolerance import EPSILON, STEP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.jobs.starts import OtherWeight
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Weight
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding


Options = dict[str, dict[str, str]]
RATE = "lr"
OPTIONS = (RATE, "weight_decay", "momentum", "betas", "eps", "dampening", "alpha", "rho")
"""Settings: other numbers in a group may be what the optimizer works out."""
MAX_LISTED = 3


def cause_of_steps(
    others: Sequence[OtherWeight],
    params: Mapping[str, Weight],
    parts: Mapping[str, Mapping[int, Weight]],
    jobs: tuple[WholeJob, WholeJob],
) -> Cause:
    """Return why steps before the traced one moved weights differently."""
    steps = max(record.steps_before for record in jobs[1].job.dump.files.ranks.values())
    options = options_of(jobs[0]), options_of(jobs[1])
    if different := different_options(options, jobs):
        return DifferentSettings(different)
    rates = {values[RATE] for of_job in options for values in of_job.values() if RATE in values}
    unknown = EarlierStepsDiffer(steps, rates.pop() if len(rates) == 1 and all(options) else "")
    dtypes = _narrow_steps(params, parts, jobs, options)
    if dtypes is None:
        return unknown
    rounding = (steps + 1) * EPSILON[dtypes[0]] / 2
    is_rounding = all(weight.apart <= rounding for weight in others)
    return StepsInNarrowDtype(*dtypes, steps, None if is_rounding else unknown)


def dtypes_of(params: Mapping[str, Weight], parts: Mapping[str, Mapping[int, Weight]]) -> tuple[str, ...]:
    """Return the dtypes of both jobs' weights."""
    first = {weight.values.dtype: None for weight in params.values() if weight.values is not None}
    of_ranks = (part for of_name in parts.values() for part in of_name.values())
    second = {part.values.dtype: None for part in of_ranks if part.values is not None}
    return tuple(first | second)


def options_of(job: WholeJob) -> Options:
    """Return the options with which a job steps each parameter."""
    records = (record for of_rank in job.job.dump.files.ranks.values() for record in of_rank.options)
    return {name: dict(record.options) for record in records for name in record.names}


def different_options(options: tuple[Options, Options], jobs: tuple[WholeJob, WholeJob]) -> tuple[str, ...]:
    """Return the options that differ, the learning rate first: `lr (0.1 in the first run, 0.2 in the second run)`."""
    first, second = options
    different = {
        (option, value, second[name][option])
        for name in first.keys() & second.keys()
        for option, value in first[name].items()
        if option in OPTIONS and second[name].get(option, value) != value
    }
    ordered = sorted(different, key=lambda each: (OPTIONS.index(each[0]), each))
    texts = [f"{option} ({old} in {jobs[0].name}, {new} in {jobs[1].name})" for option, old, new in ordered]
    return tuple(texts[:MAX_LISTED])


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


def with_own_clips(findings: Sequence[Finding], job: WholeJob) -> list[Finding]:
    """Explain gradients that no rule explains, or that ranks scale by numbers of their own, by ranks' own norms."""
    cause = own_norms(job)
    if cause is None:
        return list(findings)
    return [
        finding.because(cause) if isinstance(finding.explanation, UnexplainedBackward | ClippedByParts) else finding
        for finding in findings
    ]


def own_norms(job: WholeJob) -> ClippedByOwnNorms | None:
    """Return the cause if ranks clipped in the same calls by different norms, and some of these were too large."""
    clips = {rank: record.clips for rank, record in job.job.dump.files.ranks.items()}
    calls = list(zip(*clips.values(), strict=False))
    if len({len(of_rank) for of_rank in clips.values()}) > 1 or not calls:
        return None
    for call in calls:
        norms, limits = [clip.norm for clip in call], {clip.limit for clip in call}
        are_apart = max(norms) - min(norms) > STEP * max(norms)
        if are_apart and len(limits) == 1 and max(norms) > max(limits):
            texts = (f"{number(norm)} on rank {rank}" for rank, norm in zip(clips, norms, strict=True))
            return ClippedByOwnNorms(tuple(texts), max(limits), _are_reduced(job))
    return None


def _are_reduced(job: WholeJob) -> bool:
    """Whether all ranks have every gradient, and equally: what they were clipped by was then not yet reduced."""
    every = by_name(job.job.ranks, "grad").values()
    values = [[part.values for part in parts.values() if part.values is not None] for parts in every]
    return bool(values) and all(
        len(copies) == len(job.job.ranks) and all(np.array_equal(copies[0].values, copy.values) for copy in copies)
        for copies in values
    )
