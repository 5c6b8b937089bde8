"""Gradients that only one of two jobs has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.explain.step.gradients import ReductionSwitchedOff
from shardviz.explain.step.two_jobs import TrainedInOneJob
from shardviz.layout.mesh import ranks_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.jobs.starts import Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
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
