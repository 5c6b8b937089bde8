"""Two jobs' traces of a step compared, in sentences: starts first, then where they differ.

Weights that differ before the step may have been moved by earlier steps: optimizers have options and dtypes. Gradients
may be wrong because each rank clipped them by a norm of its own, as the job's trace says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.ranks import without_trace
from shardviz.check.report import NotChecked, findings_in, grouped, ranks_by_name
from shardviz.check.step.comparison import compared
from shardviz.check.step.departure import Beside, Departure, StepDifference, departure_for
from shardviz.check.step.jobs.assembly import JobEvidence, assembled, findings_on
from shardviz.check.step.jobs.averages import averages_of, with_copies_before
from shardviz.check.step.jobs.buffers import (
    DRAWN,
    buffers_of,
    redrawn_buffers,
    unseen_buffers,
    with_buffer_read,
    with_buffers_before,
)
from shardviz.check.step.jobs.changed_inputs import rounded_input, with_module_settings
from shardviz.check.step.jobs.gradients import (
    OUTSIDE_MODULES,
    clips_of,
    frozen_in_one_job,
    held_back_gradients,
    trained_in_one_job,
    unclipped,
    with_kept_gradients,
    with_own_clips,
)
from shardviz.check.step.jobs.later_outputs import later_outputs_of, with_copies_apart
from shardviz.check.step.jobs.line_values import OrderInCalls
from shardviz.check.step.jobs.optimizers import (
    different_settings,
    is_one_resumed,
    lost_states,
    states_before,
    without_reduced_in_step,
)
from shardviz.check.step.jobs.other_steps import (
    LaterResult,
    cause_of_steps,
    drifts_of,
    histories_of,
    is_filled_batch,
    later_steps_of,
)
from shardviz.check.step.jobs.paddings import paddings_of, with_padding_read
from shardviz.check.step.jobs.rows import Rows, rows_of_jobs, rows_of_peers
from shardviz.check.step.jobs.rows_of_steps import with_other_steps
from shardviz.check.step.jobs.starts import (
    Belonging,
    OtherWeight,
    Weights,
    belongings_of,
    coarsest_of,
    dtypes_of,
    farthest_weights,
    other_weights,
    repeated_weight,
)
from shardviz.check.step.jobs.updates import Updates, between_steps, stale_copies, updates_of, without_step
from shardviz.check.step.jobs.whole_job import WholeJob, chosen, mesh_of_job
from shardviz.check.step.lines.naming import module_to_open, with_lines
from shardviz.check.step.trace.calls import parted_modules
from shardviz.check.step.trace.judging import Judging
from shardviz.check.step.trace.traces import (
    JobTrace,
    counts_per_forward,
    largest_of,
    trace_of,
)
from shardviz.dump.records.trace import STEP
from shardviz.explain.checkpoints.conversion import NarrowedOnTheWay
from shardviz.explain.placement.splits import SameShard
from shardviz.explain.placement.values import RepeatedDraw
from shardviz.explain.step.batches import DifferentBatch, FilledBatch, WholeBatchPerRank
from shardviz.explain.step.forward import PartOfAnotherRank
from shardviz.explain.step.modules import UnexplainedModule
from shardviz.explain.step.two_jobs import DifferentWeights
from shardviz.explain.step.whole_step import MisplacedWeights, RowsOfPeers, UnexplainedCopies
from shardviz.groups import in_groups
from shardviz.relate.tolerance import NEAR_STARTS
from shardviz.relate.values import magnitude
from shardviz.text import counted, fold, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

MAX_LISTED = 3
TWO_PIPELINES = (
    "the step, module by module: both jobs are pipelines; compare each with a job without stages: shardviz run --trace "
    "-o one -- python train.py"
)
WITHOUT_GRADIENT = "its gradient: only a sample of it was kept, or ranks have different ones"
UNSHARDED = "the unsharded model"
WHICH_IS_RIGHT = "Which of the two is right they do not show; one process does: shardviz run --trace -- python train.py"
LINES_OF_OTHER_ROWS = (
    "the lines that were recorded: a call of the model has rows of several calls of one process; give the ranks the "
    "same micro-batches together to compare them"
)
LINES_OF_LOSSES = "the lines around the model: the step calls it several times, and each call has a loss of its own"
"""Why lines were not compared: it matters only if something differs."""
DRIFTED = (
    "{} before the step, up to {:.2g} of their size apart: rounding decides where an optimizer moves an element "
    "whose gradient is nearly zero; what the optimizers keep of the gradients before agrees, or is rounding alone"
)
DIFFERS_AFTER_DRIFT = (
    "the step, module by module: it differs, as it may if it begins with weights that rounding took apart; trace the "
    "first step too (--trace-step 1)"
)
BEST, PLACED, AGREEING = 3, 2, 1
WEIGHTS = "the jobs' weights agree"
BAD = frozenset(("odd", "repeated", "cut", "none"))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One job compared with the other.

    Attributes:
        is_explained: Whether a rule says why.
        is_complete: Whether all of both was compared.
    """

    difference: StepDifference
    is_explained: bool = False
    is_complete: bool = True

    @property
    def worth(self) -> int:
        """Rank of a comparison, most telling first: cause, place, agreement, incomparable starts."""
        kinds = [one.kind for one in self.difference.departures]
        if not kinds:
            return AGREEING
        return (BEST if self.is_explained else PLACED) if kinds[0] == "sharded" else 0


def compare_jobs(before: Dump, after: Dump) -> StepDifference | None:
    """Compare the traces of two jobs; None if neither has one."""
    with np.errstate(all="ignore"):  # a job that went wrong has NaN
        first_trace = trace_of(before)
        second_trace = trace_of(after)
        if first_trace is None or second_trace is None:
            if first_trace is second_trace:
                return None
            which, dump = ("the first", before) if first_trace is None else ("the second", after)
            return _not_compared(f"the step, module by module: {without_trace(dump, which)}")
        missing = first_trace.dump.files.missing_ranks or second_trace.dump.files.missing_ranks
        if missing:
            return _not_compared(f"the step, module by module: no trace of {named_ranks(missing, MAX_LISTED)}")
        first = _whole_job(first_trace, before, "the first run")
        second = _whole_job(second_trace, after, "the second run")
        names = {name: None for dump, job in ((before, first), (after, second)) for name in unseen_buffers(dump, job)}
        difference = _compare_both(first, second)
        return replace(difference, unjudged_buffers=tuple(names | dict.fromkeys(difference.unjudged_buffers)))


def _whole_job(trace: JobTrace, dump: Dump, name: str) -> WholeJob:
    replaced = frozenset(name for record in dump.files.ranks.values() for name in record.replaced)
    return WholeJob(trace.dump, trace.ranks, mesh_of_job(dump, trace), name, replaced)


def _compare_both(first: WholeJob, second: WholeJob) -> StepDifference:
    """Compare two jobs, the one with whole values as the reference; else each may be, and the more telling counts."""
    if first.is_of_one or second.is_of_one:
        return _compare(*((first, second) if first.is_of_one else (second, first))).difference
    if first.is_pipeline and second.is_pipeline:
        return _not_compared(TWO_PIPELINES)
    if first.is_pipeline or second.is_pipeline:
        return _compare(*((second, first) if first.is_pipeline else (first, second))).difference
    first_attempt = _compare(first, second)
    if first_attempt.worth == BEST or (first_attempt.is_complete and first_attempt.worth == AGREEING):
        return first_attempt.difference
    return max(first_attempt, _compare(second, first), key=lambda attempt: attempt.worth).difference


def _not_compared(why: str) -> StepDifference:
    return StepDifference(not_compared=(NotChecked("", why, "step"),))


def _compare(reference: WholeJob, job: WholeJob) -> Attempt:
    """Compare a job, rank by rank, with what the ranks of another job have together."""
    parts = job.weights("param")
    ways = reference.ways(parts, job.mesh)
    params = {name: way.weight for name, way in ways.items()}
    job = replace(job, padded=paddings_of(params, parts, job.mesh))
    parts = job.weights("param")
    padded = {name: Belonging(None, unpadded.regions) for name, unpadded in job.padded.items()}
    belongings = padded | belongings_of(params, parts, job.mesh)
    grads, updated = reference.put_as_weights(ways, "grad"), reference.put_as_weights(ways, "param", "updated")
    weights = Weights(params, grads, updated, parts, belongings, ways=ways)
    weights = replace(weights, histories=histories_of(reference, job, weights))
    others, num_weights = other_weights(params, parts, belongings)
    drifts = drifts_of([other.name for other in others if not other.has_relation], reference, job, weights)
    others = [other for other in others if other.name not in drifts]
    if others:
        departure = _of_weights(others, num_weights, weights, (reference, job))
        farthest, allowed = farthest_weights(weights)
        dtypes = dtypes_of(params, parts) if farthest else ()
        num_equal = num_weights - len(others)
        return Attempt(StepDifference((departure,), num_equal, farthest, allowed, dtypes, (), WEIGHTS, is_of_jobs=True))
    if (idle := without_step(reference, job)) is not None:
        sides = {"not_compared": (idle,)} if isinstance(idle, NotChecked) else {"departures": (idle,)}
        return Attempt(StepDifference(num_compared=num_weights, agreement=WEIGHTS, is_of_jobs=True, **sides), True)
    rows = rows_of_jobs(reference, job)
    if rows.problem:
        peers = rows_of_peers(reference, job, weights)
        rows = rows if peers is not None else with_other_steps(rows, reference, job)
        clause = f"; ranks along {peers.axis} were given different rows" if peers is not None else ""
        cause = peers or rows.cause
        if isinstance(cause, DifferentBatch):
            cause = replace(cause, is_resumed=is_one_resumed(reference, job))
        if isinstance(cause, WholeBatchPerRank) and is_filled_batch(reference, job):
            cause = FilledBatch()
        departure = departure_for(cause, "batch", "", f"{job.name}: {rows.problem}{clause}")
        return Attempt(StepDifference((departure,), num_weights, agreement=WEIGHTS, is_of_jobs=True))
    records = (record for each in (reference, job) for record in each.records.values())
    reasons = dict.fromkeys(why for record in records for _, why in record.not_checked)
    left_out = [NotChecked("", why, "step") for why in reasons]
    if rows.not_joined:  # gradients are of the whole batch, however ranks share it
        left_out.append(NotChecked("", f"the step, module by module: {rows.not_joined}", "step"))
    order = OrderInCalls.of(rows, reference, job)
    left_out += (
        [NotChecked("", DRIFTED.format(counted(len(drifts), "weight"), max(drifts.values())), "step")] if drifts else []
    )
    judging = Judging({}, {}, job.mesh) if rows.not_joined else _judging(reference, job, rows, drifts)
    attempt = _step_of(reference, job, judging, replace(weights, order=order), left_out)
    if drifts and attempt.difference.departures and not attempt.is_explained:
        return Attempt(_not_compared(DIFFERS_AFTER_DRIFT), is_complete=False)
    first = next(iter(attempt.difference.departures), None)
    # A sum of different rows, as a lookup's, or a layer's part of other rows than its peers have.
    if first is not None and not isinstance(first.explanation, RowsOfPeers):
        peers = rows_of_peers(reference, job, weights)
        is_open = isinstance(first.explanation, UnexplainedModule | PartOfAnotherRank)
        if peers is not None and (is_open or first.place == peers.module):
            clause = f"ranks along {peers.axis} were given different rows; {first.place} is the first wrong module"
            departure = departure_for(peers, "batch", "", f"{job.name}: {clause}", following=first.following)
            difference = replace(attempt.difference, departures=(departure,))
            return replace(attempt, difference=difference, is_explained=True)
    return attempt


def _of_weights(
    others: Sequence[OtherWeight], total: int, weights: Weights, jobs: tuple[WholeJob, WholeJob]
) -> Departure:
    """Return the difference of the weights; if matrices are near and steps were made before, those made it."""
    first = others[0]
    names = listed([str(fold) for fold, _ in fold((weight.name, None) for weight in others)])
    what, cause = _relation_of(first)
    steps = jobs[1].steps_before
    is_near = all(weight.apart <= NEAR_STARTS for weight in others if len(weights.params[weight.name].shape) > 1)
    if steps and isinstance(cause, DifferentWeights):
        cause = cause_of_steps(others, weights, jobs, steps) if is_near else replace(cause, steps=steps)
    begin = f"weights differ already before the step, {len(others)} of {total}: {names}"
    is_unknown = isinstance(cause, DifferentWeights | MisplacedWeights)
    repeated = repeated_weight(others, weights.params, weights.parts) if is_unknown else None
    if repeated is not None:
        part = next(iter(weights.parts[repeated.name].values())).values
        assert part is not None, "it was compared"
        shapes = f"{list(part.shape)} of {list(weights.params[repeated.name].shape)}"
        clause = f"each rank of {jobs[1].name} has a part of {repeated.name}, {shapes}, and all have the same values"
        axes = jobs[1].mesh.long_axes
        is_of_whole = isinstance(cause, MisplacedWeights)
        cause = SameShard(axes) if is_of_whole else RepeatedDraw(" and ".join(axes), part.device.startswith("cpu"))
        return departure_for(cause, "weights", repeated.name, f"{begin}; {clause}")
    sentence = f"{begin}; on rank {first.rank} of {jobs[1].name} {first.name} {what}"
    return departure_for(cause, "weights", first.name, sentence)


def _relation_of(weight: OtherWeight) -> tuple[str, Cause]:
    """Return what a weight is of the other job's, as the rest of a sentence, and why."""
    if weight.holds:
        return f"has the values of the other job's {weight.holds}", MisplacedWeights(is_exchanged=True)
    if weight.rounded:
        return f"and the other job's differ by a rounding to {weight.rounded}", NarrowedOnTheWay(weight.rounded)
    if weight.is_permuted:
        order = f": {weight.order}" if weight.order else ""
        return f"has numbers of the other job's {weight.name}, at other places{order}", MisplacedWeights()
    size = f"{100 * weight.apart:.2g}% of" if weight.apart < 1 else f"{weight.apart:.2g} times"
    how = f"differs by up to {size} its largest element"
    return how if np.isfinite(weight.apart) else "fits no part of the other job's", DifferentWeights(of_jobs=True)


def _judging(reference: WholeJob, job: WholeJob, rows: Rows, drifts: Mapping[str, float]) -> Judging:
    counts = counts_per_forward(reference.counts)
    parted = parted_modules(reference.ranks) | parted_modules(job.ranks)
    counts = {name: count for name, count in counts.items() if name not in parted}
    of_ranks = {rank: own.points(counts, rows=reference.rows(counts)) for rank, own in job.ranks.items()}
    choices = reference.choices(counts, job.rows(counts))
    if rows.order is not None or rows.columns is not None:
        parts = {place: [own[place].values for own in of_ranks.values() if place in own] for place in choices}
        choices = {
            place: [(way, rows.as_ranks_have(point, parts[place])) for way, point in ways]
            for place, ways in choices.items()
        }
    whole = chosen(choices, of_ranks, job.mesh)
    of_modules = in_groups((name.rpartition(".")[0], far) for name, far in drifts.items())
    drifted = {module: max(all_far) for module, all_far in of_modules.items()}
    return Judging(whole, of_ranks, job.mesh, coarsest=coarsest_of((reference, job)), drifted=drifted)


def _step_of(
    reference: WholeJob, job: WholeJob, judging: Judging, weights: Weights, left_out: Sequence[NotChecked]
) -> Attempt:
    if not judging.judgments and not left_out:
        why = "the step, module by module: the two models have no module of one name"
        return Attempt(_not_compared(why), is_complete=False)
    reference_name = "one process" if reference.is_of_one else reference.name
    evidence, sampled, judged = _judged(reference, job, judging, weights)
    dump = evidence.dump
    results = [*without_reduced_in_step(judged, job, weights), *trained_in_one_job(weights, job)]
    results += frozen_in_one_job(weights, job) if not findings_in(results) else ()
    results += [*held_back_gradients(weights, job), *different_settings(reference, job), *lost_states(reference, job)]
    results += stale_copies(reference, job)
    findings = _explained(grouped(findings_in(results), ranks_by_name(dump)), evidence, reference, job, weights)
    look = _look_at_lines(findings, reference, job)

    def unless_wrong(compare: Callable[[], Updates]) -> Updates:
        """Compare what comes later in a step, unless something is wrong that it comes of."""
        later = compare() if not findings else Updates()
        findings.extend(grouped(findings_in(later.results), ranks_by_name(dump)))
        results.extend(later.results)
        return later

    kept = unless_wrong(lambda: states_before(reference, job, weights))
    updates = unless_wrong(lambda: updates_of(reference, job, weights))
    averages = unless_wrong(lambda: averages_of(reference, job, weights))
    buffers = unless_wrong(lambda: buffers_of(reference, job, are_updates_right=not updates.results))
    unless_wrong(lambda: between_steps(reference, job, weights))
    later = LaterResult() if findings else later_steps_of(reference, job)
    of_outputs, num_with_outputs, drawn = _later_outputs(reference, job) if later.agrees else (None, 0, [])
    not_compared = [result for result in results if isinstance(result, NotChecked)]
    not_compared += [NotChecked("", why, "step") for why in later.gaps]
    not_compared += [NotChecked(name, WITHOUT_GRADIENT, "step") for name in sampled]
    not_compared += [*drawn, *_without_numbers(judging, reference), *_apart(judging, reference)]
    not_compared += [*left_out, *(_without_lines(reference, weights.order) if findings else ())]
    states = {place: set(judgment.state.values()) for place, judgment in judging.judgments.items()}
    right = [place for place, of_ranks in states.items() if not of_ranks & BAD]
    num_odd = len({(place.module, place.call) for place, of_ranks in states.items() if of_ranks & BAD})
    sizes = {place: largest_of(judging.whole[place].values) or 1.0 for place in right}
    looks = (look, *[""] * len(findings))
    departures = [_departure(each, num_odd, reference, job, text) for each, text in zip(findings, looks, strict=False)]
    difference = StepDifference(
        (*departures, *filter(None, (later.departure, of_outputs))),
        len(weights.params) + len(right) + kept.num_right + updates.num_right + averages.num_right + buffers.num_right,
        max(judging.drift, _farthest_gradient(evidence)),
        max((judging.judgments[place].near / sizes[place] for place in right), default=0.0),
        _dtypes(judging),
        tuple(not_compared),
        "the jobs agree",
        Beside(evidence, tuple(findings), reference_name),
        is_of_jobs=True,
        has_update=bool(updates.num_right),
        num_later=later.count,
        num_with_rows=later.with_rows,
        without_rows=tuple(sorted((*later.without_rows, *later.unequal))),
        num_with_outputs=num_with_outputs,
        unjudged_buffers=buffers.others,
    )
    return Attempt(difference, bool(findings) and not findings[0].generic, not not_compared)


def _later_outputs(reference: WholeJob, job: WholeJob) -> tuple[Departure | None, int, list[NotChecked]]:
    """Return what later steps' outputs differ in, how many agree, and what ranks draw that they depend on."""
    if drawn := redrawn_buffers(reference, job):
        return None, 0, [NotChecked(name, DRAWN, "step") for name in drawn]
    departure, num_agreeing = later_outputs_of(reference, job)
    return departure and with_copies_apart(departure, reference, job), num_agreeing, []


def _explained(
    findings: Sequence[Finding], evidence: JobEvidence, reference: WholeJob, job: WholeJob, weights: Weights
) -> list[Finding]:
    """Return findings of a step, first those of a module, with what else the two jobs' records say of them."""
    findings = with_copies_before(findings, reference, job, weights)
    findings = [with_buffer_read(finding, evidence.calls, reference, job) for finding in findings]
    findings = [with_module_settings(finding, reference, job) for finding in findings]
    findings = with_buffers_before(findings, reference, job)
    findings = [with_padding_read(finding, job) for finding in findings]
    placed = sorted(findings_in(with_lines(evidence.dump, findings)), key=lambda finding: not finding.module)
    return with_kept_gradients(with_own_clips(placed, job), reference, job)


def _without_lines(reference: WholeJob, order: OrderInCalls | None) -> Iterator[NotChecked]:
    """Yield why recorded lines were not compared, if they were not."""
    has_lines = any(record.lines for record in reference.records.values())
    if reference.is_of_one and has_lines and not (order is not None and order.has_one_loss):
        yield NotChecked("", LINES_OF_OTHER_ROWS if order is None else LINES_OF_LOSSES, "step")


def _judged(
    reference: WholeJob, job: WholeJob, judging: Judging, weights: Weights
) -> tuple[JobEvidence, tuple[str, ...], list[Finding | NotChecked]]:
    """Return what a step shows, which gradients are incomplete, and what is wrong.

    If each rank clipped gradients by its own norm and no rule explains them, a rule may explain what they were before.
    """
    dump, sampled = assembled(job, judging, weights, reference)
    micro_batches = max(rank.counts.get("", 1) for rank in job.ranks.values())
    clips, reference_name = clips_of(reference, job), "one process" if reference.is_of_one else reference.name
    holding = {name: frozenset(parts) for name, parts in job.weights("param").items()}
    evidence = JobEvidence(dump, tuple(compared(dump)), clips, micro_batches, reference.is_of_one, holding)
    of_input = rounded_input(evidence, judging, job)
    results: list[Finding | NotChecked] = (
        [of_input] if of_input is not None else list(findings_on(evidence, judging, reference_name))
    )
    is_unexplained = any(isinstance(finding.explanation, UnexplainedCopies) for finding in findings_in(results))
    before = unclipped(reference, job, weights) if is_unexplained and weights.grads and not weights.kept else None
    if before is None:
        return evidence, sampled, results
    judged = _judged(reference, job, judging, before)
    is_explained = not any(finding.generic for finding in findings_in(judged[2]))
    return judged if is_explained else (evidence, sampled, results)


def _farthest_gradient(evidence: JobEvidence) -> float:
    """Return how far an element of a right gradient is off at most, relative to the largest of any, or of its own."""
    gradients = (one for one in evidence.gradients.values() if not one.incomparable and not one.wrong)
    sizes = ((one.farthest, max(magnitude(one.wanted), one.rounding.size)) for one in gradients)
    return max((far / size for far, size in sizes if size), default=0.0)


def _apart(judging: Judging, reference: WholeJob) -> Iterator[NotChecked]:
    """Yield how many places have values that cannot be put together: copies that are not equal, for one."""
    of_ranks = [own.items() for own in judging.ranks.values()]
    lost = {place for own in of_ranks for place, point in own if point.values is not None} - judging.whole.keys()
    if lost and not reference.is_of_one:
        where = f"{counted(len(lost), 'place')} of the step"
        why = f"{where}: the parts that ranks of {reference.name} have do not fit together"
        yield NotChecked("", why, "step")


def _dtypes(judging: Judging) -> tuple[str, ...]:
    """Return the dtypes of what modules compute, those of the first job first."""
    both = (judging.whole, *list(judging.ranks.values())[:1])
    of_jobs = [{point.values.dtype for point in points.values() if point.values is not None} for points in both]
    return tuple(dict.fromkeys(dtype for dtypes in of_jobs for dtype in sorted(dtypes)))


def _without_numbers(judging: Judging, reference: WholeJob) -> Iterator[NotChecked]:
    if judging.num_not_finite:
        who = "the job of one process" if reference.is_of_one else reference.name
        why = f"{counted(judging.num_not_finite, 'place')} of the step: {who} has NaN or infinity there"
        yield NotChecked("", why, "step")


def _look_at_lines(findings: Sequence[Finding], reference: WholeJob, job: WholeJob) -> str:
    """Return how to see the line of the first finding; empty if it is named, or its lines were looked at."""
    has_line = not findings or findings[0].line or isinstance(findings[0].explanation, OUTSIDE_MODULES)
    module = None if has_line else module_to_open(findings[0])
    if module is None or not reference.is_of_one or reference.is_pipeline or job.is_pipeline:
        return ""
    recorded = [lines for record in job.records.values() for lines in record.lines]
    seen = {name for lines in recorded for name in (lines.module, lines.asked)}
    what = "lines" if module in ("", STEP) else f"lines={module}"
    return "" if module in seen else f"to see the line, run both jobs again with --trace {what}"


def _departure(finding: Finding, num_odd: int, reference: WholeJob, job: WholeJob, look: str) -> Departure:
    module = finding.module or finding.tensor
    first, why = f"{job.name}: {finding.summary}", finding.explanation.advice
    following = num_odd - 1 if finding.module else 0
    other_job = "the other job" if reference.is_of_one else reference.name
    first, why = (text.replace(UNSHARDED, other_job) for text in (first, why))
    why += "" if reference.is_of_one else f". {WHICH_IS_RIGHT}"
    return Departure("sharded", module, "", first, why, max(following, 0), finding.explanation, finding.line, look)
