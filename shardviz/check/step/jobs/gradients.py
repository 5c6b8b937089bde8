"""All gradients of two jobs: how each clips them, ties that one job broke, and those that only one of them has.

Gradients are recorded as the optimizer is given them, which is after they are clipped. If both jobs clip, gradients
that were too large are not, and their factor shows in the norms that were found: it is the one that the gradients have
once both clippings are undone, or else a norm is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import grouped, ungrouped
from shardviz.check.step.rules.all_gradients import (
    CLIP_EPSILON,
    multiplied,
    nearness,
    of_all,
    of_factor,
    round_norm,
    total,
)
from shardviz.check.step.rules.factors import size_in_words
from shardviz.dump.records.step import ClipRecord
from shardviz.explain.placement.values import BrokenTie
from shardviz.explain.step.factors import FactorOfAxes, MultipliedTerm
from shardviz.explain.step.gradients import (
    LostMicroBatches,
    MicroBatchesReducedAgain,
    ReductionSwitchedOff,
    UnclearedGradients,
    UnsummedTiedGradients,
)
from shardviz.explain.step.modules import RoundedInput
from shardviz.explain.step.scales import (
    ClippedByOwnNorms,
    ClippedByParts,
    ScaledBackward,
    ScaledByOwnCount,
    ScaledInStep,
)
from shardviz.explain.step.sums import GradientNotReduced
from shardviz.explain.step.two_jobs import DifferentClips, GradientsNotZeroed, TrainedInOneJob
from shardviz.explain.step.whole_step import UnexplainedBackward, UnexplainedWeightGradients
from shardviz.explain.templates import number
from shardviz.groups import the_only
from shardviz.layout.mesh import ranks_by
from shardviz.layout.notation import parse
from shardviz.layout.splits import axes_in
from shardviz.relate.factors import ratio_near
from shardviz.relate.measures import factor_of_all, ratio_of
from shardviz.relate.tolerance import EPSILON, STEP, least_factor
from shardviz.text import counted, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared, Found
    from shardviz.check.step.evidence import Evidence
    from shardviz.check.step.jobs.starts import Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Weight
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]

MADE_BY_CLIPS = UnexplainedBackward | UnexplainedWeightGradients | ClippedByParts | ScaledByOwnCount | ScaledInStep
"""Causes of gradients that clipping by ranks' own norms explains better."""
OUTSIDE_MODULES = (
    RoundedInput
    | DifferentClips
    | GradientsNotZeroed
    | LostMicroBatches
    | MicroBatchesReducedAgain
    | UnclearedGradients
)
"""Causes that lie in no line of a forward."""
MAX_LISTED = 4
UNCLIPPED = ClipRecord(0.0, math.inf)
"""What a job does that clips no gradients."""


@dataclass(frozen=True, slots=True)
class Clips:
    """The one call by which each of two jobs clipped its gradients.

    Attributes:
        reference: That of the job which the other is compared with.
        job: The other's, the same on all of its ranks.
        unmet: The limit of a call that found no gradients, and so clipped nothing; None if each found some.
    """

    reference: ClipRecord
    job: ClipRecord
    unmet: float | None = None

    @property
    def of_both(self) -> bool:
        """Whether both jobs clip."""
        return UNCLIPPED not in (self.reference, self.job)

    @property
    def before(self) -> float:
        """The ratio of the norms that were found."""
        return self.job.norm / self.reference.norm if self.reference.norm else 1.0

    @property
    def after(self) -> float:
        """The ratio of two gradients after clipping that were equal before it."""
        return _kept(self.job) / _kept(self.reference)


def _kept(clip: ClipRecord) -> float:
    return min(1.0, clip.limit / (clip.norm + CLIP_EPSILON))


def clips_of(reference: WholeJob, job: WholeJob) -> Clips | None:
    """Return how two jobs clipped their gradients; None if neither did, or one did several times or by several norms.

    A call that finds a norm of 0 clips nothing.
    """
    clips = []
    unmet = None
    for each in (reference, job):
        calls = _calls(each)
        is_seen = bool(calls) or not any(record.clips for record in each.records.values())
        if not is_seen or any(len(set(call.values())) > 1 for call in calls):
            return None
        every = [next(iter(call.values())) for call in calls]
        if not all(math.isfinite(clip.norm) and clip.limit > 0 for clip in every):
            return None
        unmet = next((clip.limit for clip in every if not clip.norm), unmet)
        clips.append([clip for clip in every if clip.norm] or [UNCLIPPED])
    if any(len(of_job) > 1 for of_job in clips) or clips == [[UNCLIPPED], [UNCLIPPED]]:
        return None
    return Clips(clips[0][0], clips[1][0], unmet)


def _calls(job: WholeJob) -> list[dict[int, ClipRecord]]:
    """Return each call of a step that clipped gradients, by rank, with the norm of all ranks; none if ranks differ."""
    of_ranks = {rank: record.clips for rank, record in job.records.items()}
    if len({len(clips) for clips in of_ranks.values()}) != 1:
        return []
    calls = [dict(zip(of_ranks, clips, strict=True)) for clips in zip(*of_ranks.values(), strict=True)]
    return [{rank: _whole(clip, call) for rank, clip in call.items()} for call in calls]


def _whole(clip: ClipRecord, call: Mapping[int, ClipRecord]) -> ClipRecord:
    """Return a call's record with the norm of the norms of all ranks that have a part; NaN if the dump lacks some."""
    if not clip.ranks:
        return clip
    norms = [call[rank].norm if rank in call else math.nan for rank in clip.ranks]
    return ClipRecord(float(np.linalg.norm(norms, math.inf if clip.order is None else clip.order)), clip.limit)


def of_size_before(evidence: Evidence, clips: Clips | None) -> Finding | None:
    """Return the finding of all gradients if they had a factor before they were clipped that they have not since."""
    gradients = tuple(gradient for gradient in evidence.gradients.values() if np.any(gradient.wanted))
    all_alike = multiplied(evidence)
    if (
        clips is None
        or not clips.of_both
        or not gradients
        or (all_alike is None and any(gradient.wrong for gradient in gradients))
    ):
        return None
    factor = all_alike.factor if all_alike is not None else 1.0
    epsilon = gradients[0].rounding.epsilon
    near = STEP if epsilon <= EPSILON["float32"] else least_factor(epsilon)
    if math.isclose(clips.after, 1, rel_tol=near) or math.isclose(clips.before, 1, rel_tol=near):
        return None
    if not math.isclose(factor, clips.before * clips.after, rel_tol=near):
        return None
    return of_factor(
        evidence,
        gradients,
        clips.before,
        f"the factor is that from before clipping to a norm of {number(clips.job.limit)}",
    )


def of_loss(evidence: Evidence, scale: float | None, found: Sequence[Finding]) -> Finding | None:
    """Return the finding of all gradients if backward begins with a factor that no wrapper takes out; or None.

    They may have been clipped since: then a finding has the factor from before, or by a job's own code to a round norm.

    Args:
        scale: What every rank's backward begins with the other job's gradient times; None if ranks differ in it.
        found: What else is found of all gradients.
    """
    all_alike = multiplied(evidence)
    if all_alike is None or scale is None or len(found) > 1:
        return None
    gradients, mesh = all_alike.gradients, evidence.dump.files.mesh
    divides_by = the_only({gradient.divides_by for gradient in gradients})
    near = nearness(gradients)
    before = ratio_near(scale / divides_by, mesh.size, near) if divides_by else None
    size = size_in_words(mesh, before) if before is not None and before > 1 else ""
    if before is None or not size or before == evidence.num_runs:
        return None
    norm = float(np.sqrt(sum(np.sum(np.square(gradient.wanted)) for gradient in gradients)))
    limit, when = round_norm(all_alike.factor, norm, near), ""
    if not math.isclose(all_alike.factor, before, rel_tol=max(near, STEP)):
        if not limit or all_alike.factor >= before:
            return None
        when = f"the factor is that from before clipping to a norm of {number(limit)}"
    begins = (
        f"backward begins with {number(scale)} times the other job's gradient of the output, and the reduction of "
        f"gradients divides by {number(divides_by or 1)}"
    )
    finding = of_factor(evidence, gradients, float(before), when)
    other = finding.explanation
    cause = MultipliedTerm(
        size, int(before), of_all=True, or_else=other.or_else if isinstance(other, FactorOfAxes) else other
    )
    return replace(finding, details=(*finding.details, begins)).because(cause)


def by_another_norm(evidence: Evidence, clips: Clips | None) -> Finding | None:
    """Return the finding of all gradients if clipping alone made their factor: they were equal before it."""
    all_alike = multiplied(evidence)
    if clips is None or all_alike is None or math.isclose(clips.after, 1, rel_tol=STEP):
        return None
    gradients = all_alike.gradients
    epsilon = gradients[0].rounding.epsilon
    near = STEP if epsilon <= EPSILON["float32"] else least_factor(epsilon)
    if not math.isclose(all_alike.factor, clips.after, rel_tol=near):
        return None
    if clips.job.limit != clips.reference.limit:
        unmet = "" if clips.unmet is None else f"{clips.unmet:g}"
        cause: Cause = DifferentClips(_in_words(clips.reference.limit, clips.job.limit), unmet)
    else:
        held = {
            rank: [one.reduced[rank] for one in gradients if rank in one.reduced] for rank in evidence.dump.files.ranks
        }
        norms = {rank: total(parts) / _kept(clips.job) for rank, parts in held.items()}
        alike = [rank for rank, norm in norms.items() if math.isclose(norm, clips.job.norm, rel_tol=near)]
        whose = f"the norm of the gradients of {named_ranks(alike, MAX_LISTED)} alone"
        text = whose if alike else f"which is {number(clips.reference.norm)} in the other job"
        cause = ClippedByParts(f"a norm of {number(clips.job.norm)}, {text}", clips.job.limit)
    return of_factor(evidence, gradients, all_alike.factor).because(cause)


def scaled_by_owners(evidence: Evidence) -> Finding | None:
    """Return the finding of all gradients if each rank scales all that it alone has by a number of its own.

    A gradient that ranks have parts of, or equal copies, shows that by itself. With ZeRO by hand one rank has it alone.
    """
    gradients = [gradient for gradient in evidence.gradients.values() if np.any(gradient.wanted)]
    if not any(len(gradient.reduced) == 1 for gradient in gradients):
        return None
    ranks = sorted({rank for gradient in gradients for rank in gradient.reduced})
    factors = {rank: factor_of_all(gradients, {rank}) for rank in ranks}
    numbers = [factor for factor in factors.values() if factor is not None]
    epsilon = gradients[0].rounding.epsilon
    near = STEP if epsilon <= EPSILON["float32"] else least_factor(epsilon)
    if len(numbers) < max(len(ranks), 2) or max(numbers) - min(numbers) <= near * max(map(abs, numbers)):
        return None
    shown = listed(f"{number(factor)} on rank {rank}" for rank, factor in factors.items() if factor is not None)
    odd = tuple(rank for rank, factor in factors.items() if factor is not None and abs(factor - 1) > near)
    first = gradients[0]
    finding = ClippedByParts().finding(first.name, odd, f"the gradient is scaled by {shown}", kind="wrong-scale")
    return of_all(finding.seen_in(first), gradients) if len(gradients) > 1 else finding.seen_in(first)


def _in_words(reference: float, job: float) -> tuple[str, str]:
    """Return to which norms two jobs clip, in words."""
    texts = [f"{limit:g}" if math.isfinite(limit) else "no limit" for limit in (reference, job)]
    return f"{texts[0]} in the other job", f"{texts[1]} in this one"


def with_round_norms(evidence: Evidence, finding: Finding, clips: Clips | None) -> Finding:
    """Explain a factor of all gradients by clipping that was not seen, if their norm is round in the reference."""
    all_alike, cause = multiplied(evidence), finding.explanation
    if all_alike is None or not isinstance(cause, ScaledBackward) or cause.is_of_micro_batches:
        return finding
    near = nearness(all_alike.gradients)
    norm = total(gradient.wanted for gradient in all_alike.gradients)
    rounded, rounded_here = round_norm(1.0, norm, near), round_norm(all_alike.factor, norm, near)
    if not rounded or (clips is not None and clips.of_both):
        return finding
    limits = _in_words(rounded, rounded_here or all_alike.factor * norm)
    return finding.because(DifferentClips(limits, is_seen=False))


def with_own_clips(findings: Sequence[Finding], job: WholeJob) -> list[Finding]:
    """Explain gradients that no rule explains, or that are scaled by any number, by ranks' own norms.

    Terms that are clipped differently add up to a multiple of the right gradient if they are multiples of each other.
    """
    cause = own_norms(job)
    if cause is None:
        return list(findings)
    explained = [
        replace(single.because(cause), kind="wrong-value", generic=False)
        if isinstance(single.explanation, MADE_BY_CLIPS)
        else single
        for single in ungrouped(findings)
    ]
    return grouped(explained)


def own_norms(job: WholeJob) -> ClippedByOwnNorms | None:
    """Return the cause if ranks clipped in the same calls by different norms, and some of these were too large."""
    for clips in _calls(job):
        norms, limits = [clip.norm for clip in clips.values()], {clip.limit for clip in clips.values()}
        are_apart = max(norms) - min(norms) > STEP * max(norms)
        if are_apart and len(limits) == 1 and max(norms) > max(limits):
            texts = (f"{number(norm)} on rank {rank}" for rank, norm in zip(clips, norms, strict=True))
            return ClippedByOwnNorms(tuple(texts), max(limits), _are_reduced(job))
    return None


def unclipped(reference: WholeJob, job: WholeJob, weights: Weights) -> Weights | None:
    """Return gradients as they were before each rank clipped them by a norm of its own; None unless all did, once."""
    calls, wanted = _calls(job), _calls(reference)
    if own_norms(job) is None or len(calls) != 1 or len(wanted) > 1 or not all(clip.norm for clip in calls[0].values()):
        return None
    kept = {rank: _kept(clip) for rank, clip in calls[0].items()}
    whole = min(map(_kept, wanted[0].values())) if wanted else 1.0
    return replace(weights, grads={name: divided(weight, whole) for name, weight in weights.grads.items()}, kept=kept)


def divided(weight: Weight, by: float) -> Weight:
    """Return a gradient divided by a number."""
    values = weight.values
    return weight if values is None or by == 1 else replace(weight, values=values.with_values(values.values / by))


def _are_reduced(job: WholeJob) -> bool:
    """Whether all ranks have every gradient, and equally: what they were clipped by was then not yet reduced."""
    every = job.weights("grad").values()
    values = [[part.values for part in parts.values() if part.values is not None] for parts in every]
    return bool(values) and all(
        len(copies) == len(job.ranks) and all(np.array_equal(copies[0].values, copy.values) for copy in copies)
        for copies in values
    )


def with_others_reduced(evidence: Evidence, pairs: Sequence[Found]) -> list[Found]:
    """Return a step's findings; if code of the job itself leaves some gradients out of what it averages, it is blamed.

    Ranks have different rows, so that copies of a gradient are equal and right only if something reduces them.
    """
    causes = [finding.explanation for _, finding in pairs if isinstance(finding.explanation, GradientNotReduced)]
    cause = the_only({*causes})
    if cause is None or cause.wrapper != "none" or cause.op != "AVG" or cause.rest is not None:
        return list(pairs)
    left_out = {result.name for result, finding in pairs if finding.explanation == cause}
    alike = [gradient for gradient in evidence.gradients.values() if _is_of_own_rows(evidence, gradient, cause.axes)]
    reduced = [gradient.name for gradient in alike if not gradient.wrong]
    if not reduced or not left_out <= {gradient.name for gradient in alike}:
        return list(pairs)
    is_last = max(_order_of(evidence, name) for name in left_out) <= min(_order_of(evidence, name) for name in reduced)
    named = replace(cause, reduced=counted(len(reduced), "other gradient"), place="last" if is_last else "")
    return [(result, finding.because(named) if result.name in left_out else finding) for result, finding in pairs]


def _is_of_own_rows(evidence: Evidence, gradient: Compared, axes: Sequence[str]) -> bool:
    """Whether neither a wrapper nor a label reduces a gradient over axes that split the rows of its module's input."""
    calls = evidence.calls.by_module.get(gradient.name.rpartition(".")[0], ())
    point = calls[0].point("input", "right") if calls else None
    split = {*axes_in(parse(point.layout).chains[0])} if point is not None and point.layout else set()
    is_copied = not gradient.claimed_partial and not any(map(gradient.is_split, axes))
    is_alone = is_copied and gradient.wrapped_over(axes) == "none"
    return is_alone and split >= {*axes} and bool(np.any(gradient.wanted))


def _order_of(evidence: Evidence, name: str) -> int:
    """Return when the first call of a weight's module ended in forward."""
    return evidence.calls.by_module[name.rpartition(".")[0]][0].order


def broken_ties(gradients: Mapping[str, Compared]) -> Iterator[Finding]:
    """Yield names that have one gradient in the other job, of which ranks have two terms."""
    wrong = [gradient for gradient in gradients.values() if not gradient.incomparable and gradient.wrong]
    for first, second in combinations(wrong, 2):
        if not np.array_equal(first.wanted, second.wanted):
            continue
        terms = [_put_together(gradient) for gradient in (first, second)]
        are_copies = np.array_equal(terms[0], terms[1]) and first.reduced.keys() & second.reduced.keys()
        if not are_copies and first.near(terms[0] + terms[1], first.wanted):
            cause = _cause(first, second)
            members = [
                cause.finding(one.name, one.wrong, f"the gradient and that of {other} are two terms of the right one")
                for one, other in ((first, second.name), (second, first.name))
            ]
            members = [member.seen_in(one) for member, one in zip(members, (first, second), strict=True)]
            yield replace(members[0], members=tuple(members))


def _cause(first: Compared, second: Compared) -> Cause:
    """Return why two names of one weight have a term of its gradient each: by the ranks that have them."""
    if first.reduced.keys() & second.reduced.keys():
        return BrokenTie(second.name, first.name)
    is_half = ratio_of(first) == Fraction(1, 2) == ratio_of(second)
    return UnsummedTiedGradients(2) if is_half else UnsummedTiedGradients()


def _put_together(gradient: Compared) -> NDArray[np.float64]:
    """Return a gradient put together of ranks' parts; NaN if one lacks a part."""
    whole = np.full(gradient.wanted.size, np.nan)
    for rank, held in gradient.reduced.items():
        whole[gradient.regions[rank].flat_ids(gradient.wanted.shape).ravel()] = held.ravel()
    return whole.reshape(gradient.wanted.shape)


def with_kept_gradients(findings: Sequence[Finding], reference: WholeJob, job: WholeJob) -> list[Finding]:
    """Explain gradients that no rule explains, or that are scaled, by those that the step before left."""
    kept = {name for record in job.records.values() for name in record.kept_gradients}
    if not kept or any(record.kept_gradients for record in reference.records.values()):
        return list(findings)
    cause = GradientsNotZeroed(len(kept))
    explained = [
        replace(single.because(cause), kind="wrong-value", generic=False)
        if isinstance(single.explanation, MADE_BY_CLIPS) and single.tensor in kept
        else single
        for single in ungrouped(findings)
    ]
    return grouped(explained)


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
