"""What is wrong in a job's step beside that of one process: the first wrong module, and what its values show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.check.step.jobs.random import check_masks, draws
from shardviz.check.step.no_gradient import check_no_gradient
from shardviz.check.step.rules.ratios.all_gradients import of_all_gradients
from shardviz.check.step.run import explained
from shardviz.check.step.trace.naming import of_output, placed, with_cut
from shardviz.check.step.words import number
from shardviz.explain.finding import Finding
from shardviz.explain.losses import MeanOfMeans
from shardviz.explain.step import UnexplainedJobStep
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.jobs.assembled import JobEvidence
    from shardviz.check.step.jobs.judging import Judging
    from shardviz.check.step.trace.divergence import Divergence

MAX_LISTED = 4


def findings_on(evidence: JobEvidence, judging: Judging, other: str) -> Iterator[Finding | NotChecked]:
    """Yield what is wrong, causes before consequences.

    Args:
        evidence: Both jobs, assembled.
        judging: What each rank has at every place.
        other: What the other job is called.
    """
    first = evidence.divergence
    if first is not None and first.direction == "forward":
        yield _in_forward(evidence, judging, first, other)
        return
    results = [(one, result) for one in evidence.results for result in explained(evidence, one)]
    yield from (result for _, result in results if isinstance(result, NotChecked))
    found, said = of_all_gradients(evidence, [(one, result) for one, result in results if isinstance(result, Finding)])
    unequal = _of_unequal_losses(judging) if first is None and (found or said) else None
    if unequal is not None:
        yield unequal
        return
    yield from said
    absent, found = with_cut(evidence, list(check_no_gradient(evidence)), placed(evidence, found))
    yield from (one for one in absent if isinstance(one, Finding))
    yield from (finding for _, finding in found)


def _in_forward(evidence: JobEvidence, judging: Judging, first: Divergence, other: str) -> Finding | NotChecked:
    call = first.call
    if draws(judging, call.module, call.number):
        name = call.module or "the model itself"
        why = (
            f"what follows {name}: it draws random numbers, and the jobs draw different ones; make both run without "
            "(p=0 or eval()), or load the same masks, to compare the rest"
        )
        return check_masks(judging, call.module, call.number) or NotChecked(call.module, why, "step")
    ranks = tuple(sorted(call.points))
    name = first.module or "the model itself"
    base = UnexplainedJobStep().finding(name, ranks, f"its step is not that of {other}", generic=True)
    return of_output(evidence, first, base)


def _of_unequal_losses(judging: Judging) -> Finding | None:
    """Return the finding if ranks' losses count rows unequally, so that the mean of their gradients is another one."""
    scales = judging.scales
    if len(set(scales.values())) < 2:
        return None
    text = listed([f"{number(scale)} on rank {rank}" for rank, scale in sorted(scales.items())], MAX_LISTED)
    return MeanOfMeans().finding(
        "loss",
        tuple(sorted(scales)),
        f"all outputs are right, and backward begins with the other job's gradient times a number of the rank's own: "
        f"{text}",
        kind="wrong-scale",
    )
