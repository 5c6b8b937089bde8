"""Wrong gradients of a job that each rank clipped by a norm of its own, as the job's trace says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.starts import by_name
from shardviz.explain.step.scales import ClippedByOwnNorms, ClippedByParts
from shardviz.explain.step.whole_step import UnexplainedBackward
from shardviz.explain.templates import number
from shardviz.relate.tolerance import STEP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.explain.finding import Finding


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
