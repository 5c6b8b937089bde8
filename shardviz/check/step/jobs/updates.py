"""How two jobs' weights move after equal gradients: in the optimizer's step, and between it and the next forward.

Where a gradient is nearly zero, rounding decides what an optimizer makes of it: Adam divides by its size. If steps were
made before, what the optimizer keeps of an element may be nearly zero, too.

Between steps a job may prune or clamp weights, or copy averages into them. Weights that the step leaves alike then have
to change alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.comparison import Compared, compared, whole_of
from shardviz.check.step.departure import Departure, departure_for
from shardviz.check.step.evidence import Evidence
from shardviz.check.step.jobs.assembly import Assembling, add_gradients, add_weight, are_whole
from shardviz.check.step.update.compare import finding_of
from shardviz.explain.step.stepped_copies import StaleCopies, StepNotCopied
from shardviz.explain.step.two_jobs import NoStepOnRanks, OtherChangesBetweenSteps, StepWithoutEffect
from shardviz.explain.step.update import (
    LeftOutOfOptimizer,
    OptimizerOfOtherParameters,
    StepNotSent,
    StepOverwritten,
    UnexplainedWeight,
)
from shardviz.layout.mesh import ranks_by
from shardviz.relate.tolerance import NOISE, OPPOSITE, ROUNDINGS_OF_RULE, UPDATE_OF_JOB
from shardviz.relate.values import farthest, magnitude
from shardviz.text import counted, fold, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.other_steps import History
    from shardviz.check.step.jobs.starts import PartsByName, Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Weight
    from shardviz.dump.records.step import GivenRecord
    from shardviz.explain.finding import Finding


@dataclass(frozen=True, slots=True)
class Updates:
    """What became of a step's updates, of what optimizers keep for them, or of buffers.

    Attributes:
        results: What differs, or was not compared.
        num_right: How many weights, states or buffers have the same values.
        others: Buffers that differ, as they may.
    """

    results: tuple[Finding | NotChecked, ...] = ()
    num_right: int = 0
    others: tuple[str, ...] = ()


def updates_of(reference: WholeJob, job: WholeJob, weights: Weights) -> Updates:
    """Compare the weights that ranks have after the step with the other job's.

    An optimizer may step each weight on one rank, which the job then sends to the others: such a weight is compared
    again as the next forward begins.
    """
    parts = job.weights("param", "updated")
    names = [name for name in weights.updated if name in parts]
    whole = [name for name in names if are_whole(weights.params[name], weights.updated[name], *parts[name].values())]
    if not whole:
        return Updates()
    changed, settled = job.weights("param", "next"), _settled(reference, job)
    is_needed = bool(changed or settled)
    changed_there = reference.put_as_weights(weights.ways, "param", "next", since="updated") if is_needed else {}
    after = {name: (weights.updated[name], parts[name]) for name in whole}
    after |= {
        name: (changed_there.get(name, weights.updated[name]), parts[name] | changed.get(name, {}))
        for name in settled.intersection(whole)
    }
    results = _results(job, weights, after)
    then = {
        name: (changed_there.get(name, weights.updated[name]), parts[name] | changed[name])
        for name, result in results.items()
        if result is not None and name in changed
    }
    then = {name: (there, here) for name, (there, here) in then.items() if are_whole(there, *here.values())}
    is_sent = {name for name, result in _results(job, weights, then).items() if result is None} if then else set()
    results = {name: result for name, result in results.items() if name not in is_sent}
    steps = _Steps(job)
    differing = [_explained(steps, result) for result in results.values() if result is not None]
    if len(whole) < len(names):
        why = f"{counted(len(names) - len(whole), 'weight')} after the optimizer's step: only a sample of each was kept"
        differing.append(NotChecked("", why, "step"))
    return Updates(tuple(differing), list(results.values()).count(None) + len(is_sent))


def _settled(reference: WholeJob, job: WholeJob) -> set[str]:
    """Return the weights of which one job alone steps copies: that has them as the next forward begins, if at all."""
    copied, copied_there = (
        {name for record in each.records.values() for name in record.stepped_copies} for each in (job, reference)
    )
    return copied ^ copied_there


def _results(
    job: WholeJob, weights: Weights, after: Mapping[str, tuple[Weight, Mapping[int, Weight]]]
) -> dict[str, Finding | NotChecked | None]:
    """Return what differs in each weight after a step, by name.

    Args:
        after: Of each weight, the other job's whole one and the ranks' parts.
    """
    assembling = Assembling(job, job.mesh)
    add_gradients(assembling, weights)
    first = min(job.ranks)
    for name, (there, here) in after.items():
        add_weight(assembling, first, name, ("reference", "param"), weights.params[name])
        add_weight(assembling, first, name, ("updated", "param"), there)
        for rank, weight in here.items():
            add_weight(assembling, rank, name, ("step", "param"), weight, weights.belongings.get(name))
    dump = assembling.dump()
    evidence = Evidence(dump, tuple(compared(dump)))
    before = job.weights("param")
    return {
        weight.name: _result(evidence, weight, before[weight.name], weights.histories.get(weight.name))
        for weight in compared(dump, ("param",), reference="updated")
    }


class _Steps:
    """A job's weights before its step, after it, and as the next forward begins, by name."""

    def __init__(self, job: WholeJob) -> None:
        self.job = job
        self.before, self.after = job.weights("param"), job.weights("param", "updated")
        self.changed = job.weights("param", "next")
        records = (options for record in job.records.values() for options in record.options)
        self.copied = {name for record in job.records.values() for name in record.stepped_copies}
        self.groups = [options.names for options in records]
        self.stepped = {name for names in self.groups for name in names}

    def beside(self, name: str) -> str:
        """Return a weight with the same settings that a step moves on every rank; empty if there is none."""
        others = (other for names in self.groups if name in names for other in names if other in self.before)
        return next((other for other in others if self._is_moved(other)), "")

    def _is_moved(self, name: str) -> bool:
        before, after = self.before[name], self.after.get(name, {})
        return bool(after) and all(rank in before and not _are_equal(before[rank], after[rank]) for rank in after)


def _explained(steps: _Steps, result: Finding | NotChecked) -> Finding | NotChecked:
    """Return what differs in a weight, with the cause if some ranks don't step it, or step another tensor."""
    if isinstance(result, NotChecked):
        return result
    name, job = result.tensor, steps.job
    if name in steps.copied:
        return _of_copy(steps, result)
    if name in job.replaced:
        return result.because(OptimizerOfOtherParameters("sharding"))
    before, after = steps.before.get(name, {}), steps.after.get(name, {})
    idle = tuple(rank for rank in after if rank in before and _are_equal(before[rank], after[rank]))
    stepping = tuple(sorted(after.keys() - {*idle}))
    if not idle or result.ranks != idle or not after.keys() <= before.keys():
        return result
    if not stepping:
        is_reached = name in steps.stepped
        return result.because(StepWithoutEffect(steps.beside(name)) if is_reached else LeftOutOfOptimizer())
    if not all(record.given and record.given[0].followed_by is not None for record in job.records.values()):
        why = f"the weight after the optimizer's step: only {named_ranks(stepping, MAX_LISTED)} took it, and {UNSEEN}"
        return NotChecked(name, why, "step")
    then = after | steps.changed.get(name, {})
    if not all(_are_equal(before[rank], then[rank]) for rank in idle):
        return result
    if not all(_are_equal(before[rank], then[rank]) for rank in stepping):
        return result.because(StepNotSent())
    sentence = (
        f"after the optimizer's step only {named_ranks(stepping, MAX_LISTED)} has the new values; as the next forward "
        "begins every rank has those from before the step"
    )
    return replace(result, sentence=sentence, ranks=tuple(sorted(after))).because(StepOverwritten(stepping, True))


def _of_copy(steps: _Steps, result: Finding) -> Finding:
    """Return what differs in a weight whose copies are stepped, with the cause if it stays as it was on some ranks."""
    before, after = steps.before.get(result.tensor, {}), steps.after.get(result.tensor, {})
    idle = tuple(rank for rank in after if rank in before and _are_equal(before[rank], after[rank]))
    if idle and result.ranks == idle:
        return result.because(StepNotCopied())
    is_unexplained = isinstance(result.explanation, UnexplainedWeight)
    return result.because(StepNotCopied(is_other=True)) if is_unexplained else result


def stale_copies(reference: WholeJob, job: WholeJob) -> Iterator[Finding]:
    """Yield weights of which ranks step copies that have other values before the step, if they all should be equal."""
    stale_there = {name for record in reference.records.values() for name in record.stale_copies}
    ranks_of = ranks_by((rank, name) for rank, record in job.records.items() for name in record.stale_copies)
    for name, ranks in ranks_of.items():
        if name not in stale_there:
            who = named_ranks(ranks, MAX_LISTED)
            text = f"before the step the copy of it that the optimizer steps on {who} has other values than the weight"
            yield StaleCopies(job.steps_before).finding(name, tuple(ranks), text)


def without_step(reference: WholeJob, job: WholeJob) -> Departure | NotChecked | None:
    """Return that no optimizer steps on some ranks that run the model; not compared if something writes their weights.

    Their traces go on to the end of the job, so nothing else of the step can be compared.
    """
    idle = tuple(rank for rank, record in job.records.items() if not record.given)
    if not idle or len(idle) == len(job.records) or not all(record.given for record in reference.records.values()):
        return None
    before, after = (job.weights("param", moment) for moment in ("step", "updated"))
    kept = {rank: [name for name in after if rank in after[name] and rank in before.get(name, {})] for rank in idle}
    verb = "takes" if len(idle) == 1 else "take"
    sentence = f"{named_ranks(idle, MAX_LISTED)} never {verb} a step of the optimizer"
    if not all(
        kept[rank] and all(_are_equal(before[name][rank], after[name][rank]) for name in kept[rank]) for rank in idle
    ):
        return NotChecked("", f"the step, module by module: {sentence}, and something else writes the weights", "step")
    text = f"{job.name}: {sentence}, and the weights stay as they were"
    return departure_for(NoStepOnRanks(idle), "sharded", "", text)


def _are_equal(first: Weight, second: Weight) -> bool:
    values, others = first.values, second.values
    return values is not None and others is not None and np.array_equal(values.values, others.values)


def _result(
    evidence: Evidence, weight: Compared, before: Mapping[int, Weight], history: History | None
) -> Finding | NotChecked | None:
    """Return what differs in a weight after the step; None if it is the other job's."""
    if weight.incomparable:
        return NotChecked(weight.name, f"the weight after the optimizer's step: {weight.incomparable}", "step")
    whole = whole_of(evidence.dump, "param", weight.name)
    assert whole is not None, "it was added with the weight"
    start = whole.reshape(weight.wanted.shape)
    moves = {rank: _moves(weight, rank, start, before.get(rank)) for rank in weight.reduced}
    moved = max(magnitude(move) for both in moves.values() for move in both)
    offs = {rank: held - wanted for rank, (held, wanted) in moves.items()}
    if history is not None and history.allow(offs.values(), moved):
        return None
    far = {rank: _farthest(evidence, weight, rank, off, moved) for rank, off in offs.items()}
    wrong = {rank: element for rank, element in far.items() if element is not None}
    if wrong and weight.name not in evidence.gradients and moved:
        why = "the weight after the optimizer's step: it differs, and its gradient was not compared"
        return NotChecked(weight.name, why, "step")
    return finding_of(evidence, weight, wrong).seen_in(weight) if wrong else None


def _moves(
    weight: Compared, rank: int, whole: NDArray[np.float64], before: Weight | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how far the step moves each element of a rank's weight, and of the other job's.

    Args:
        whole: The other job's weight before the step.
        before: The rank's; if it is not known, the other job's is taken for it.
    """
    held, wanted, start = weight.reduced[rank], weight.wanted_of(rank), weight.part(whole, rank)
    own = before.values.values if before is not None and before.values is not None else start
    return held - (own if own.shape == held.shape else start), wanted - start


def _farthest(
    evidence: Evidence, weight: Compared, rank: int, off: NDArray[np.float64], moved: float
) -> tuple[float, float] | None:
    """Return the element of a rank's weight that is farthest off, and what it should be; None if all are right.

    Args:
        off: How far apart the step moves each element in the two jobs.
        moved: How far it moves one at most, in either.
    """
    held, expected = weight.reduced[rank], weight.wanted_of(rank)
    rounded = weight.rounding.epsilon * magnitude(weight.wanted)
    allowed = moved * np.minimum(UPDATE_OF_JOB + NOISE * _errors(evidence, weight, rank), OPPOSITE) + rounded
    off = np.where(np.abs(off) <= allowed, -1.0, np.nan_to_num(np.abs(off), nan=np.inf))
    if not (off > 0).any():
        return None
    at = np.unravel_index(np.argmax(off), off.shape)
    return float(held[at]), float(expected[at])


def _errors(evidence: Evidence, weight: Compared, rank: int) -> NDArray[np.float64]:
    """Return how far each element's gradient is off, relative to itself, as far as the largest error of any shows."""
    gradient = evidence.gradients.get(weight.name)
    if gradient is None or gradient.incomparable or gradient.wanted.size != weight.wanted.size:
        return np.zeros(weight.reduced[rank].shape)
    error = max(farthest(held, gradient.wanted_of(other)) for other, held in gradient.reduced.items())
    sizes = np.abs(weight.part(gradient.wanted, rank))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sizes > 0, error / sizes, np.inf if error else 0.0)


FEWEST_ODD, LEAST_ODD = 3, 0.01
"""If fewer elements differ, or a smaller share of those that change, rounding may decide about them."""
MAX_LISTED = 3
UNSEEN = "the next forward, before which it may be sent to the others, was not seen"
WHAT = "what changes weights between the optimizer's step and the next forward"


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a rank's part of a weight between two steps.

    Attributes:
        after: What the optimizer leaves: the rank's, and what the other job has there.
        then: What the next forward begins with, in the same order.
        near: How far rounding may take an element.
    """

    after: tuple[NDArray[np.float64], NDArray[np.float64]]
    then: tuple[NDArray[np.float64], NDArray[np.float64]]
    near: float

    @property
    def moves(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How far each element is moved, in the two jobs."""
        return self.then[0] - self.after[0], self.then[1] - self.after[1]

    @property
    def num_moved(self) -> int:
        """How many elements are moved in one of the jobs."""
        return int(np.count_nonzero((np.abs(self.moves[0]) > self.near) | (np.abs(self.moves[1]) > self.near)))

    @property
    def odd(self) -> NDArray[np.bool_]:
        """Which elements are moved in another way than in the other job."""
        first, second = self.moves
        drift = magnitude(self.after[0] - self.after[1])
        largest = max(magnitude(first), magnitude(second))
        return np.asarray(np.abs(first - second) > self.near + 2 * drift + UPDATE_OF_JOB * largest)

    @property
    def are_zeros(self) -> bool:
        """Whether each of these becomes zero in one of the jobs, and not in the other."""
        held, wanted = (values[self.odd] == 0 for values in self.then)
        return bool(np.all(held != wanted))


def between_steps(reference: WholeJob, job: WholeJob, weights: Weights) -> Updates:
    """Compare what becomes of weights before the next forward with what becomes of the other job's."""
    after = job.weights("param", "updated")
    changed = job.weights("param", "next")
    changed_there = reference.put_as_weights(weights.ways, "param", "next", since="updated")
    settled = _settled(reference, job)
    names = [
        name
        for name in after
        if name in weights.updated and name not in settled and (name in changed or name in changed_there)
    ]
    if not names:
        return Updates()
    which = listed([str(folded) for folded, _ in fold((name, None) for name in names)], MAX_LISTED)
    records = [record for each in (reference, job) for record in each.records.values()]
    then = {name: after[name] | changed.get(name, {}) for name in names}
    then_there = {name: changed_there.get(name, weights.updated[name]) for name in names}
    if not _begin_alike([record.given[:1] for record in records]):
        why = "the jobs begin their next steps with calls of different modules, or one job's call was not seen"
        return Updates((NotChecked("", f"{WHAT} ({which}): {why}", "step"),))
    every = [(then_there[name], weights.updated[name], *after[name].values(), *then[name].values()) for name in names]
    if not all(are_whole(*of_name) for of_name in every):
        why = "only a sample of some was kept, or ranks' parts do not fit together"
        return Updates((NotChecked("", f"{WHAT} ({which}): {why}", "step"),))
    pairs = (
        _laid_out(job, weights, names, wholes, parts)
        for wholes, parts in ((weights.updated, after), (then_there, then))
    )
    changes = _changes(*pairs)
    num_odd = sum(int(np.count_nonzero(change.odd)) for of_ranks in changes.values() for change in of_ranks.values())
    num_moved = sum(change.num_moved for of_ranks in changes.values() for change in of_ranks.values())
    if num_odd == 0:
        return Updates((), len(changes))
    if any(record.given[0].draws_after for record in records):
        why = "it differs between the jobs, and random numbers are drawn there"
        return Updates((NotChecked("", f"{WHAT} ({which}): {why}", "step"),))
    if num_odd < FEWEST_ODD or num_odd < LEAST_ODD * num_moved:
        why = f"{num_odd} of {num_moved} elements differ, and rounding may decide about these"
        return Updates((NotChecked("", f"{WHAT} ({which}): {why}", "step"),))
    cause = OtherChangesBetweenSteps(_what(changes), _alone(job, bool(changed), bool(changed_there)))
    return Updates(tuple(_findings(changes, cause)))


def _begin_alike(given: Sequence[tuple[GivenRecord, ...]]) -> bool:
    """Whether the step after the traced one begins with a call of one module, with tensors of one kind, on all ranks.

    Lightning calls the whole model on several ranks, and in one process only what the training step calls.
    """
    begins = {
        (record.followed_by, frozenset(shape[1:] for shape in record.shapes)) for records in given for record in records
    }
    return all(given) and len(begins) == 1 and None not in {followed_by for followed_by, _ in begins}


def _alone(job: WholeJob, is_changed: bool, is_changed_there: bool) -> str:
    """Return the only job that changes weights, in words; empty if both do."""
    return "" if is_changed and is_changed_there else job.name if is_changed else "the other job"


def _laid_out(
    job: WholeJob, weights: Weights, names: Sequence[str], wholes: Mapping[str, Weight], parts: PartsByName
) -> dict[str, Compared]:
    """Lay ranks' parts of weights beside the other job's whole ones."""
    assembling = Assembling(job, job.mesh)
    for name in names:
        add_weight(assembling, min(job.ranks), name, ("reference", "param"), wholes[name])
        for rank, part in parts[name].items():
            add_weight(assembling, rank, name, ("step", "param"), part, weights.belongings.get(name))
    weights_there = compared(assembling.dump(), ("param",))
    return {weight.name: weight for weight in weights_there if not weight.incomparable}


def _changes(after: Mapping[str, Compared], then: Mapping[str, Compared]) -> dict[str, dict[int, Change]]:
    return {
        name: {
            rank: Change(
                (after[name].reduced[rank], after[name].wanted_of(rank)),
                (weight.reduced[rank], weight.wanted_of(rank)),
                ROUNDINGS_OF_RULE * weight.rounding.epsilon * magnitude(weight.wanted),
            )
            for rank in weight.reduced
        }
        for name, weight in then.items()
        if name in after
    }


def _what(changes: Mapping[str, Mapping[int, Change]]) -> str:
    """Return `shard` if each rank alone zeroes an equal share of its part, `zeros` if zeros differ, else empty."""
    odd = {name: of_ranks for name, of_ranks in changes.items() if any(each.odd.any() for each in of_ranks.values())}
    if not all(change.are_zeros for of_ranks in odd.values() for change in of_ranks.values()):
        return ""
    are_equal, are_equal_there = (
        all(_are_equal_shares([change.then[which] for change in of_ranks.values()]) for of_ranks in odd.values())
        for which in (0, 1)
    )
    return "shard" if are_equal and not are_equal_there else "zeros"


def _are_equal_shares(parts: Sequence[NDArray[np.float64]]) -> bool:
    """Whether as many elements of each part are zero, relative to its size, within one element."""
    counts = [(np.count_nonzero(part == 0), part.size) for part in parts if part.size]
    share = sum(zeros for zeros, _ in counts) / max(sum(size for _, size in counts), 1)
    return all(abs(zeros - share * size) <= 1 for zeros, size in counts)


def _findings(changes: Mapping[str, Mapping[int, Change]], cause: OtherChangesBetweenSteps) -> list[Finding]:
    findings = []
    for name, of_ranks in changes.items():
        ranks = tuple(rank for rank, change in of_ranks.items() if change.odd.any())
        if ranks:
            change = of_ranks[ranks[0]]
            count = f"{np.count_nonzero(change.odd):,} of {change.odd.size:,}"
            text = (
                "it agrees with the other job's after the optimizer's step, and no longer as the next forward begins: "
                f"on rank {ranks[0]} {count} elements changed differently"
            )
            findings.append(cause.finding(name, ranks, text))
    return findings
