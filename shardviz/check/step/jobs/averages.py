"""Averages of weights that two jobs keep in buffers, such as an EMA, and other copies of a model: a teacher, for one.

An average moves toward a weight by a share of its distance to it. What of the other job does so is an average; a
teacher, a gradient or a copy does not, and is left out. A rank's average is compared with what the rank's own weights
make of it, so that it is right if rounding stepped these in a slightly different direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.comparison import weight_of
from shardviz.check.step.jobs.starts import others_on
from shardviz.check.step.jobs.updates import Updates
from shardviz.check.step.update.states import other_decay
from shardviz.explain.step.buffers import OtherAverage, OtherCopyBefore, UnexplainedBuffer
from shardviz.explain.step.whole_step import UnexplainedBackward
from shardviz.groups import in_groups, the_only
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import (
    ALIKE,
    CANCELED,
    EPSILON,
    FEW,
    LEAST_STATISTIC,
    ROUNDINGS_OF_RULE,
)
from shardviz.relate.values import magnitude, root_mean_square
from shardviz.text import counted, named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.starts import PartsByName, Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Weight
    from shardviz.explain.finding import Finding

    Values = NDArray[np.float64]
    Why = OtherAverage | UnexplainedBuffer
    Wanted = tuple[float, str, Values]  # the share, the moment of the weight, and the average before the step
    Averages = Sequence[tuple[str, str, "Average"]]

T = TypeVar("T")

MAX_LISTED = 3
MOMENTS = ("after", "before")


@dataclass(frozen=True, slots=True)
class Average:
    """An average before and after a step, and the weight that it is of.

    Attributes:
        weights: The weight by moment: `after` the step, or `before` it.
        near: How far rounding may take an element.
        of_other_job: Whether the weight is the other job's: the rank has all of the average, and a part of the weight.
    """

    before: Values
    after: Values
    weights: Mapping[str, Values]
    near: float
    of_other_job: bool = False

    @property
    def moved(self) -> float:
        """How far an element was moved at most."""
        return magnitude(self.after - self.before)

    @property
    def is_moved(self) -> bool:
        """Whether something but rounding moved it."""
        return self.moved > self.near

    def share(self, moment: str) -> float | None:
        """Return the share of the distance to a weight by which it moved; None if it moved in another way."""
        toward = self.weights[moment] - self.before
        taken = factor_of(self.after - self.before, toward) if np.count_nonzero(toward) >= FEW else None
        part = ALIKE if self.of_other_job else LEAST_STATISTIC
        if taken is None or magnitude(self.after - self.before - taken * toward) > self.near + part * self.moved:
            return None
        return taken

    def is_near(self, due: Values) -> bool:
        """Whether the average is what it should be: another job's weight may be off by much where rounding decides."""
        apart = self.after - due
        if not self.of_other_job:
            return magnitude(apart) <= self.near + CANCELED * magnitude(due - self.before)
        return root_mean_square(apart) <= self.near + ALIKE * root_mean_square(due - self.before)

    def is_due(self, due: Values) -> NDArray[np.bool_]:
        """Return which elements are what they should be."""
        return np.abs(self.after - due) <= self.near + ALIKE * magnitude(due - self.before)

    def made_by(self, taken: float, moment: str) -> Values:
        """Return the average that a share makes."""
        return self.before + taken * (self.weights[moment] - self.before)


def averages_of(reference: WholeJob, job: WholeJob, weights: Weights) -> Updates:
    """Compare what a job's ranks make of their averages in the step with what the other job makes of its own."""
    changed = frozenset(reference.weights("param", "next"))
    averages = in_groups(_averages_of_ranks(job, weights, changed))
    kept = {which for which, _, _ in chain.from_iterable(averages.values())}
    results: list[Finding | NotChecked] = []
    num_right = 0
    for wanted in in_groups(_moved_averages(reference, weights)).values():
        reasons = [_best(of_rank, dict(wanted)) for of_rank in averages.values()]
        if any(_are_dealt(which, averages, dict(wanted)) for which in kept):
            dealt = OtherAverage("dealt")
            reasons = [{weight: why and dealt for weight, why in own.items()} for own in reasons]
        # One piece of code makes them all: what a few numbers do not show, others do.
        explained = {why for own in reasons for why in own.values() if isinstance(why, OtherAverage)}
        of_all = the_only(explained) or UnexplainedBuffer()
        for weight, _ in wanted:
            of_ranks = {rank: own[weight] for rank, own in zip(averages, reasons, strict=True) if weight in own}
            if any(why is not None for why in of_ranks.values()):
                is_copied = all(_has_all(averages[rank], weight, weights) for rank in of_ranks)
                results.append(_result_of_average(f"average of {weight}", of_ranks, of_all, is_copied=is_copied))
            num_right += bool(of_ranks) and not any(of_ranks.values())
        if not any(reasons):
            why = "averages of weights: one process keeps some, and of the other job none was found"
            results.append(NotChecked("", why, "step"))
    return Updates(tuple(results), num_right)


def with_copies_before(
    findings: Sequence[Finding], reference: WholeJob, job: WholeJob, weights: Weights
) -> Sequence[Finding]:
    """Return findings, and first the one of a copy that differs on some ranks, if the loss sends wrong gradients.

    A rank must have one process's copy: if none has, the two jobs may keep copies of other things.
    """
    is_open = findings and all(isinstance(finding.explanation, UnexplainedBackward) for finding in findings)
    if not is_open or not reference.is_of_one:
        return findings
    wanted = in_groups(_by_which(reference.put_as_weights(weights.ways, "buffer")))
    held, after = (in_groups(_by_which(job.weights("buffer", moment))) for moment in ("step", "updated"))
    fits = [
        apart
        for which, parts in held.items()
        if _is_kept_alike(dict(parts), dict(after.get(which, ())))
        for copies in wanted.values()
        if (apart := _apart_by_rank(dict(parts), dict(copies), weights))
    ]
    return [_copy_before(min(fits, key=len)), *findings] if fits else findings


def _by_which(weights: Mapping[str, T]) -> Iterator[tuple[str, tuple[str, T]]]:
    """Yield which copy of a model each is of, and of which weight."""
    for name, weight in weights.items():
        which, _, copied = name.partition(" of ")
        if copied:
            yield which, (copied, weight)


def _is_kept_alike(before: PartsByName, after: PartsByName) -> bool:
    """Whether all ranks' copies move in the step, or none: one that a single rank keeps is stale on the others."""
    pairs = [(rank, part, after[name][rank]) for name in before.keys() & after for rank, part in before[name].items()]
    moved = {
        rank
        for rank, old, new in pairs
        if old.values is not None
        and new.values is not None
        and not np.array_equal(old.values.values, new.values.values)
    }
    return not moved or moved == {rank for rank, _, _ in pairs}


def _apart_by_rank(
    held: PartsByName, wanted: Mapping[str, Weight], weights: Weights
) -> Mapping[int, Mapping[str, float]]:
    """Return how far ranks' copies are off by rank and weight; none if all are, or something is missing."""
    if held.keys() != wanted.keys():
        return {}
    apart = {
        name: dict(others_on(wanted[name], parts, weights.belongings.get(name), ALIKE)) for name, parts in held.items()
    }
    odd = sorted({rank for off in apart.values() for rank in off})
    by_rank = {rank: {name: off[rank] for name, off in apart.items() if rank in off} for rank in odd}
    return by_rank if len(odd) < len({rank for parts in held.values() for rank in parts}) else {}


def _copy_before(apart: Mapping[int, Mapping[str, float]]) -> Finding:
    ranks = tuple(apart)
    names = list(dict.fromkeys(name for off in apart.values() for name in off))
    farthest_off = max(off for of_rank in apart.values() for off in of_rank.values())
    text = (
        f"before the step {named_ranks(ranks, MAX_LISTED)} {'has' if len(ranks) == 1 else 'have'} other numbers than "
        f"one process in a copy of the model's weights, off by up to {farthest_off:.2g} times their largest element: "
        f"{counted(len(names), 'weight')}, such as {names[0]}; the other ranks have one process's"
    )
    return OtherCopyBefore().finding(f"copy of {names[0]}", ranks, text)


def _best(of_rank: Averages, wanted: Mapping[str, Wanted]) -> dict[str, Why | None]:
    """Return why each weight's average is wrong, None if it is right, of what the rank keeps that is nearest.

    What nothing moves, as a teacher, is farther than what moves.
    """
    by_which = in_groups((which, (weight, average)) for which, weight, average in of_rank if weight in wanted)
    reasons = [{weight: _why_other(average, wanted[weight]) for weight, average in own} for own in by_which.values()]
    return min(reasons, key=lambda own: (sum(why is not None for why in own.values()), _num_idle(own)), default={})


def _num_idle(reasons: Mapping[str, Why | None]) -> int:
    """Return how many averages nothing moved."""
    return sum(isinstance(why, OtherAverage) and why.what == "none" for why in reasons.values())


def _are_dealt(which: str, averages: Mapping[int, Averages], wanted: Mapping[str, Wanted]) -> bool:
    """Whether each rank updates the average of some elements, no rank that of all, and together they leave none out.

    A rank that leaves whole averages as they were may keep those of others for later.
    """
    of_ranks: list[NDArray[np.bool_]] = []
    is_meant = True
    for own in averages.values():
        masks = []
        of_which = ((average, wanted[name]) for one, name, average in own if one == which and name in wanted)
        for average, (taken, moment, _) in of_which:
            is_due, is_stale = (average.is_due(average.made_by(taken, at)) for at in (moment, "before"))
            if not np.all(is_due | is_stale | (np.abs(average.after - average.before) <= average.near)):
                return False
            is_meant &= bool(np.all(is_due)) or not average.is_moved
            masks.append(is_due.ravel())
        of_ranks.append(np.concatenate(masks) if masks else np.ones(0, bool))
    is_of_all = len({len(mask) for mask in of_ranks}) == 1 and bool(np.all(np.any(of_ranks, axis=0)))
    return is_of_all and not is_meant and all(np.any(mask) and not np.all(mask) for mask in of_ranks)


def _has_all(of_rank: Averages, weight: str, weights: Weights) -> bool:
    """Whether a rank's average is of a whole weight."""
    whole = weights.params[weight].shape
    return all(average.before.shape == whole for _, name, average in of_rank if name == weight)


def _result_of_average(
    name: str, of_ranks: Mapping[int, Why | None], of_all: Why, *, is_copied: bool
) -> Finding | NotChecked:
    """Return the finding of an average that is wrong on some ranks: one that is saved by one rank may be right."""
    ranks = tuple(rank for rank, why in of_ranks.items() if why is not None)
    causes = {why for why in of_ranks.values() if isinstance(why, OtherAverage)}
    cause = the_only(causes) or of_all
    if is_copied and len(ranks) < len(of_ranks) and isinstance(cause, OtherAverage) and cause.what == "none":
        verb = "doesn't update its copy" if len(ranks) == 1 else "don't update their copies"
        return NotChecked(name, f"{named_ranks(ranks, MAX_LISTED)} {verb} of it", "step")
    is_on_all = len(ranks) == len(of_ranks) or cause == OtherAverage("dealt")
    who = "it" if is_on_all else f"on {named_ranks(ranks, MAX_LISTED)} it"
    text = f"{who} is another average than the other job's after the step"
    return cause.finding(name, ranks, text, kind="wrong-value")


def _moved_averages(reference: WholeJob, weights: Weights) -> Iterator[tuple[str, tuple[str, Wanted]]]:
    """Yield each average that moved in the step: which, of which weight, and how."""
    before = reference.put_as_weights(weights.ways, "buffer")
    for name, after in reference.put_as_weights(weights.ways, "buffer", "updated").items():
        weight = weight_of("buffer", name)
        average = _average_of(before.get(name), after, weights.params.get(weight), weights.updated.get(weight))
        for moment in MOMENTS if average is not None and average.is_moved else ():
            if average is not None and (share := average.share(moment)) is not None:
                yield name.partition(" of ")[0], (weight, (share, moment, average.before))
                break


def _averages_of_ranks(
    job: WholeJob, weights: Weights, changed: Collection[str]
) -> Iterator[tuple[int, tuple[str, str, Average]]]:
    """Yield what ranks have of each average, beside their own part of the weight or, if it has another shape, all.

    Args:
        changed: The weights that the other job changes behind the step, as by a norm: its averages may come before it.
    """
    old, after = job.weights("buffer"), job.weights("buffer", "updated")
    params, updated, sent = job.weights("param"), job.weights("param", "updated"), job.weights("param", "next")
    for name, held in after.items():
        weight = weight_of("buffer", name)
        for rank, part in held.items():
            sides = old.get(name, {}).get(rank), part
            steps = [moment.get(weight, {}).get(rank) for moment in (sent, updated)]  # its owner may send it after that
            if weight not in changed and _is_sent(params.get(weight, {}).get(rank), *steps[::-1]):
                steps = steps[:1]
            averages = (_average_of(*sides, params.get(weight, {}).get(rank), step) for step in steps)
            found = [average for average in averages if average is not None]
            average = next((one for one in found if one.share("after") is not None), found[0] if found else None)
            if average is None:
                average = _average_of(
                    *sides, weights.params.get(weight), weights.updated.get(weight), of_other_job=True
                )
            if average is not None:
                yield rank, (name.partition(" of ")[0], weight, average)


def _is_sent(*moments: Weight | None) -> bool:
    """Whether a rank gets elements that it did not step itself: before the step, after it, and in the next forward."""
    kept = [moment.values for moment in moments if moment is not None and moment.values is not None]
    if len(kept) < len(moments) or len({one.values.shape for one in kept}) > 1:
        return False
    before, stepped, then = (one.values for one in kept)
    return bool(np.any((stepped == before) & (then != before)))


def _average_of(*sides: Weight | None, of_other_job: bool = False) -> Average | None:
    """Return an average before and after a step, with the weight before and after it; None if they do not fit."""
    kept = [side.values for side in sides if side is not None and side.values is not None]
    is_complete = len(kept) == len(sides) and all(side.is_whole for side in kept)
    if not is_complete or len({side.values.shape for side in kept}) > 1:
        return None
    before, after, old, new = (side.values for side in kept)
    near = ROUNDINGS_OF_RULE * EPSILON.get(kept[1].dtype, EPSILON["float32"]) * magnitude(after)
    return Average(before, after, {"after": new, "before": old}, near, of_other_job)


def _why_other(average: Average, wanted: Wanted) -> OtherAverage | UnexplainedBuffer | None:
    """Return why a rank's average is not what the other job's share of the weight makes; None if it is."""
    taken, moment, before = wanted
    due = average.made_by(taken, moment)
    if average.is_near(due):
        is_other = average.is_moved and before.shape == average.before.shape
        apart = root_mean_square(average.before - before) if is_other else 0.0
        return OtherAverage("start") if apart > ALIKE * root_mean_square(before) else None
    if not average.is_moved:
        return OtherAverage("none", "before" if not magnitude(average.weights["before"] - average.before) else "")
    shares = {at: share for at in MOMENTS if (share := average.share(at)) is not None}
    others = [at for at, share in shares.items() if at != moment and math.isclose(share, taken, rel_tol=CANCELED)]
    if others:
        return OtherAverage("moment", others[0], moment)
    if moment in shares:
        return other_decay(1 - shares[moment], 1 - taken, LEAST_STATISTIC * abs(shares[moment]))
    is_old = np.abs(average.after - average.before) <= average.near
    is_part = np.all(is_old | average.is_due(due)) and not np.all(is_old) and average.of_other_job
    return OtherAverage("part") if is_part else UnexplainedBuffer()
