"""The steps before the traced one, by what they make of two jobs' weights, and those after it, by what they are given.

Optimizers such as Adam divide a gradient by its size, so that rounding decides in which direction they move an element
whose gradient is nearly zero: a few of any weight in a narrow dtype, and all of a key's bias, whose gradient is
rounding alone. What the optimizers keep shows whether the gradients of the steps before were the same.

Later rows are known by checksums, and compared if all that are of their shape agree in the traced step: what ranks pad,
crop or split in ways of their own has other checksums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import weight_of
from shardviz.check.step.departure import Departure, departure_for
from shardviz.check.step.jobs.optimizers import (
    RATE,
    RATES,
    Options,
    different_options,
    kind_of_state,
    options_in,
    options_of,
    pace_of,
    states_of,
)
from shardviz.check.step.jobs.rows_of_steps import moved_by
from shardviz.check.step.jobs.starts import OtherWeight, Weights, coarsest_of, moves_apart
from shardviz.explain.step.batches import DifferentBatch, FilledBatch, OrderBeginsAgain, OtherRowLength
from shardviz.explain.step.two_jobs import (
    DifferentSettings,
    EarlierStepsDiffer,
    Gradients,
    OtherPace,
    StepsInNarrowDtype,
)
from shardviz.groups import the_only
from shardviz.layout.mesh import ranks_by
from shardviz.relate.casts import is_narrower
from shardviz.relate.tolerance import (
    DRIFT,
    DRIFT_OF_STEPS,
    EPSILON,
    MOST_NOISE,
    OPPOSITE,
    UPDATE_OF_JOB,
    noise_of_terms,
)
from shardviz.relate.values import magnitude, root_mean_square
from shardviz.text import join_numbers, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.check.step.trace.traces import Weight
    from shardviz.dump.records.step import GivenRecord
    from shardviz.explain.cause import Cause

    Steps = list[dict[int, GivenRecord]]
    RowsByShape = dict[tuple[int, ...], set[int]]

MOMENTS = frozenset(("exp_avg", "exp_avg_sq"))
"""What Adam and its kind keep of a weight: no step of theirs moves an element by much more than the learning rate."""


@dataclass(frozen=True, slots=True)
class History:
    """What two jobs' optimizers keep of a weight says of its gradients in the steps before.

    Attributes:
        part: How far rounding may take an element, relative to how far steps move it, as norms.
        kinds: What is kept, such as `exp_avg`.
        agrees: Whether all of it is the same but for rounding.
        is_noise: Whether one of the states, such as the squares of the gradients, is rounding alone. What is divided
            by it, such as RMSprop's momentum, may then differ.
    """

    part: float
    kinds: frozenset[str] = frozenset()
    agrees: bool = True
    is_noise: bool = False

    def allow(self, apart: Iterable[NDArray[np.float64]], moved: float) -> bool:
        """Whether rounding may take elements so far apart.

        Args:
            apart: How far each is, by parts.
            moved: How far steps may have moved an element.
        """
        every = np.concatenate([part.ravel() for part in apart])
        is_rounding = (self.agrees or self.is_noise) and magnitude(every) <= OPPOSITE * moved
        return is_rounding and (self.is_noise or root_mean_square(every) <= self.part * moved)


def histories_of(reference: WholeJob, job: WholeJob, weights: Weights) -> dict[str, History]:
    """Return what is known of the gradients of weights in the steps before, by weight; nothing if there were none."""
    coarsest = coarsest_of((reference, job))
    usual = MOST_NOISE if EPSILON[coarsest] > EPSILON["float32"] else UPDATE_OF_JOB
    unknown = History(DRIFT_OF_STEPS.get(coarsest, usual))
    histories = dict.fromkeys(weights.params if job.steps_before else (), unknown)
    for states in states_of(reference, job, weights)[0] if histories else ():
        # Of a gradient whose terms cancel, rounding leaves less than it may take one from the other.
        narrow = noise_of_terms(states.narrowest)
        sizes = {weight_of("optim", state.name): magnitude(state.wanted) for state in states.states}
        for state in states.states:
            name = weight_of("optim", state.name)
            history = histories.get(name, unknown)
            is_square = bool(np.all(state.wanted >= 0))
            of_others = _largest_beside(name, sizes) if states.narrowest <= EPSILON["float32"] else max(sizes.values())
            narrowed = replace(states, noise=narrow * of_others)
            most = (narrow**2 if is_square else narrow) * of_others
            is_noise = all(magnitude(values) <= most for values in (state.wanted, *state.reduced.values()))
            histories[name] = History(
                history.part,
                history.kinds | {kind_of_state(state)},
                history.agrees and not narrowed.wrong(state),
                is_noise or history.is_noise,
            )
    return histories


def _largest_beside(name: str, sizes: Mapping[str, float]) -> float:
    """Return the largest size of what is kept of a weight's own module, with all in it.

    A bias whose gradient cancels stands beside a weight whose gradient does not; a branch that is scaled down has only
    small ones.
    """
    module = f"{name.rpartition('.')[0]}." if "." in name else ""
    return max(size for other, size in sizes.items() if other.startswith(module))


def drifts_of(names: Iterable[str], reference: WholeJob, job: WholeJob, weights: Weights) -> dict[str, float]:
    """Return how far weights are apart that rounding may have taken so far before the step, relative to their size."""
    steps = max(reference.steps_before, job.steps_before)
    rate = max(_largest_rate(reference), _largest_rate(job))
    drifts = {}
    for name in (name for name in names if name in weights.histories):
        whole, history = weights.params[name], weights.histories[name]
        apart = moves_apart(whole, weights.parts[name], weights.belongings.get(name))
        moved = steps * (rate if history.kinds >= MOMENTS else DRIFT * _moved(whole, weights.updated.get(name)))
        if apart is not None and whole.values is not None and history.allow([apart], moved):
            drifts[name] = root_mean_square(apart) / (root_mean_square(whole.values.values) or 1.0)
    return drifts


def _moved(before: Weight, after: Weight | None) -> float:
    """Return how far a step moves an element of a weight at most; 0 if that is not known."""
    if after is None or before.values is None or after.values is None:
        return 0.0
    return magnitude(after.values.values - before.values.values)


def _largest_rate(job: WholeJob) -> float:
    """Return the largest learning rate with which a job is known to have stepped a weight; 0 if none is."""
    rates = (values[rate] for values in options_of(job).values() for rate in RATES if rate in values)
    return max(map(float, rates), default=0.0)


def cause_of_steps(
    others: Sequence[OtherWeight], weights: Weights, jobs: tuple[WholeJob, WholeJob], steps: int
) -> Cause:
    """Return why so many steps before the traced one moved weights differently."""
    options = options_of(jobs[0]), options_of(jobs[1])
    if different := different_options(options, jobs):
        return DifferentSettings(different)
    rate = the_only({values[RATE] for of_job in options for values in of_job.values() if RATE in values})
    histories = (weights.histories.get(weight.name) for weight in others)
    agree = [history.agrees for history in histories if history is not None and history.kinds]
    gradients: Gradients = "equal" if agree and all(agree) else "other" if agree and steps == 1 else ""
    unknown = EarlierStepsDiffer(steps, rate if rate and all(options) else "", gradients)
    dtypes = _narrow_steps(weights, jobs, options)
    if dtypes is None:
        return unknown
    rounding = (steps + 1) * EPSILON[dtypes[0]] / 2
    is_rounding = all(weight.apart <= rounding for weight in others)
    return StepsInNarrowDtype(*dtypes, steps, None if is_rounding else unknown)


def _narrow_steps(
    weights: Weights, jobs: tuple[WholeJob, WholeJob], options: tuple[Options, Options]
) -> tuple[str, str, str] | None:
    """Return the dtypes of weights that one job's optimizer steps in fewer bits, and that job's name; else None.

    What an optimizer steps is in its groups: a copy in more bits has another name there.
    """
    for name, weight in weights.params.items():
        shard = next(iter(weights.parts.get(name, {}).values()), None)
        if shard is None or shard.values is None or weight.values is None:
            continue
        dtypes = weight.values.dtype, shard.values.dtype
        for at in (0, 1):
            narrow, wide = dtypes[at], dtypes[1 - at]
            if narrow != wide and is_narrower(narrow, wide) and name in options[at]:
                return narrow, wide, jobs[at].name
    return None


NEW_MODEL = (
    "what a new model and its optimizer begin step {0} with, as after a load: trace that step too (--trace-step {0})"
)
MOST_RANKS = 4
"""Ranks that are listed."""


@dataclass(frozen=True, slots=True)
class LaterResult:
    """Steps after the traced one.

    Attributes:
        departure: What differs in the first of them in which something does; None if nothing does.
        count: In how many settings were compared.
        with_rows: In how many of these rows were.
        without_rows: The other steps, in which rows are padded or made in ways of their own.
        unequal: Steps in which the jobs have unequal numbers of rows, which were not compared either.
        new_at: The first step of a model that both jobs go on with in the place of the traced one; 0 if there is none.
    """

    departure: Departure | None = None
    count: int = 0
    with_rows: int = 0
    without_rows: tuple[int, ...] = ()
    unequal: tuple[int, ...] = ()
    new_at: int = 0

    @property
    def agrees(self) -> bool:
        """Whether later steps were compared, and nothing differs."""
        return self.departure is None and self.count > 0

    @property
    def gaps(self) -> list[str]:
        """What was not compared, and why."""
        steps = f"step{'s' if len(self.unequal) > 1 else ''} {join_numbers(self.unequal)}"
        unequal = [f"the rows of {steps}: the jobs have unequal numbers of rows there"] if self.unequal else []
        return unequal + ([NEW_MODEL.format(self.new_at)] if self.new_at else [])


def later_steps_of(reference: WholeJob, job: WholeJob) -> LaterResult:
    """Compare what both jobs were given in the steps that both followed."""
    wanted, given = steps_of(reference), steps_of(job)
    if not wanted or not given:
        return LaterResult()
    traced, new_at = job.steps_before + 1, 0
    without_rows: list[int] = []
    unequal: list[int] = []
    rows, rows_there = ([_rows_of(step.values()) for step in steps] for steps in (given, wanted))
    alike = {shape for shape, ours in rows_there[0].items() if ours == rows[0].get(shape)}
    for at in range(1, min(len(given), len(wanted))):
        number = traced + at
        is_new = any(record.is_of_new_model for step in (wanted[at], given[at]) for record in step.values())
        new_at = new_at or (number if is_new else 0)
        before = "in the step before" if at == 1 else f"in the {at} steps before"
        if (of_settings := _of_settings((reference, job), (wanted, given), at, before)) is not None:
            return LaterResult(of_settings)
        if _is_unequal_rest(wanted, given, at):  # samplers fill up the last rows, or leave them out
            sides = ((job, given, rows, rows_there), (reference, wanted, rows_there, rows))
            filled = (_filled(each, steps, at, (ours, theirs), alike) for each, steps, ours, theirs in sides)
            if (departure := next(filter(None, filled), None)) is not None:
                return LaterResult(departure)
            unequal.append(number)
            continue
        if rows[at] and rows[at] == rows_there[at] and alike.issuperset(rows_there[0]):
            continue
        length = other_length(wanted, given, at, traced)
        if length is not None and length.length < length.wanted and alike.issuperset(rows_there[0]):
            what = "its ranks are given as many rows, and shorter ones"
            text = f"{job.name}: in step {number} {what}; all are equal {before}"
            return LaterResult(departure_for(length, "batch", "", text))
        shapes = sorted(alike & rows_there[at].keys() & rows[at].keys())
        if not shapes or not _are_padded_alike((wanted[at], given[at]), (wanted[0], given[0])):
            without_rows.append(number)  # a loader pads each rank's rows to the longest of them
            continue
        for shape in (shape for shape in shapes if rows[at][shape] != rows_there[at][shape]):
            steps_there = [
                traced + step for step, each in enumerate(rows_there) if rows[at][shape] <= each.get(shape, set())
            ]
            has = f"has, in step {steps_there[0]}" if steps_there else "does not have in it"
            ranks, again, cause = _given_again(given, at, (shape, rows_there[at][shape]), traced)
            what = f"rows that the other job {has}{moved_by(reference, wanted, given, at, shape)}"
            if again:
                what = f"the rows of step {again} again, in the same order, and the other job has others"
            text = f"{job.name}: in step {number} {ranks} given {what}; all are equal {before}"
            return LaterResult(departure_for(cause, "batch", "", text))
        if not alike.issuperset(rows_there[0]):  # ranks have parts of some rows, as of a sequence
            without_rows.append(number)
    count = min(len(given), len(wanted)) - 1
    with_rows = count - len(without_rows) - len(unequal)
    return LaterResult(None, count, with_rows, tuple(without_rows), tuple(unequal), new_at)


def other_length(wanted: Steps, given: Steps, at: int, traced: int) -> OtherRowLength | None:
    """Return that a job's rows differ from the other job's in length along one dim, as in another of its steps.

    Rows become longer from step to step in both jobs, as a curriculum makes them; rows that are padded to the longest
    of a batch do not.

    Args:
        wanted: What the other job's ranks were given in every step.
        given: The job's.
        traced: The number of the first step.
    """
    lengths = [[_row_shape(step) for step in steps] for steps in (wanted, given)]
    if not all(all(each) and each == sorted(each) for each in lengths):
        return None
    there, here = (tuple(each[at]) for each in lengths)
    dims = [dim for dim, (length, other) in enumerate(zip(here, there, strict=False)) if length != other]
    as_in = next((traced + step for step, length in enumerate(lengths[0]) if length == here), 0)
    if len(here) != len(there) or len(dims) != 1 or not as_in or _num_rows(wanted[at]) != _num_rows(given[at]):
        return None
    return OtherRowLength(traced + at, here[dims[0]], there[dims[0]], as_in)


def _row_shape(step: Mapping[int, GivenRecord]) -> tuple[int, ...]:
    """Return the shape of a step's rows, if all tensors on all ranks have rows of one; else nothing."""
    return the_only({shape[1:] for record in step.values() for shape in record.shapes}) or ()


def _is_unequal_rest(wanted: Steps, given: Steps, at: int) -> bool:
    """Whether a job has fewer rows in a step than in the first, and the other job not as many fewer."""
    (first, now), (first_there, now_there) = ((_num_rows(steps[0]), _num_rows(steps[at])) for steps in (given, wanted))
    return (now < first or now_there < first_there) and now * first_there != now_there * first


def _filled(
    job: WholeJob,
    steps: Steps,
    at: int,
    rows: tuple[Sequence[RowsByShape], Sequence[RowsByShape]],
    alike: set[tuple[int, ...]],
) -> Departure | None:
    """Return the difference if a job has all rows that the other has in a step, and more: those of an earlier step.

    What marks them as filled up, such as a weight of zero, is given with them in the other inputs, and is new.

    Args:
        job: The job that may have more.
        steps: What each of its ranks was given in every step.
        rows: The rows in each step of this job and of the other one.
        alike: The shapes of rows that both jobs had in the first step.
    """
    ours, theirs = rows[0][at], rows[1][at]
    earlier = {shape: set[int]().union(*(step.get(shape, ()) for step in rows[0][:at])) for shape in ours}
    more = {shape: ours[shape] - theirs.get(shape, set()) for shape in ours}
    is_known = ours.keys() == theirs.keys() and alike.issuperset(ours)
    if not is_known or not any(more.values()) or any(theirs[shape] - ours[shape] for shape in ours):
        return None
    if any(more[shape] - earlier[shape] for shape in ours):
        return None
    shape = max((shape for shape in ours if more[shape]), key=math.prod)
    of_ranks = {rank: more[shape].intersection(_in_order(record, shape)) for rank, record in steps[at].items()}
    ranks = [rank for rank, of_rank in of_ranks.items() if of_rank]
    origin = next((step for step in range(at) if more[shape] <= rows[0][step].get(shape, set())), None)
    whose = "earlier steps" if origin is None else f"step {job.steps_before + 1 + origin}"
    number = job.steps_before + 1 + at
    text = (
        f"{job.name}: in step {number} it has {len(ours[shape])} different rows and the other job "
        f"{len(theirs[shape])} of these; {named_ranks(ranks, MOST_RANKS)} {'is' if len(ranks) == 1 else 'are'} given "
        f"rows of {whose} again"
    )
    return departure_for(FilledBatch(), "batch", "", text)


def is_filled_batch(reference: WholeJob, job: WholeJob) -> bool:
    """Whether the other job has fewer rows in the traced step than later, when each rank has as many as before."""
    wanted, given = steps_of(reference), steps_of(job)
    return any(
        _num_rows(wanted[0]) < _num_rows(wanted[at]) and _num_rows(given[0]) == _num_rows(given[at])
        for at in range(1, min(len(given), len(wanted)))
    )


def _given_again(
    steps: Steps, at: int, wanted: tuple[tuple[int, ...], set[int]], traced: int
) -> tuple[str, int, OrderBeginsAgain | DifferentBatch]:
    """Return in words which ranks are given other rows than in the other job, the step whose rows they repeat, and why.

    The step is 0 if they repeat none. A new epoch in the same order repeats the rows from the first step on. A job that
    repeats only later ones resumes at a wrong place.

    Args:
        steps: What each rank was given in every step.
        wanted: The shape of a row, and the rows that the other job has.
        traced: The number of the first step.
    """
    shape, rows = wanted
    in_order = [{rank: _in_order(record, shape) for rank, record in step.items()} for step in steps[: at + 1]]
    odd = [rank for rank, of_rank in in_order[at].items() if not rows.issuperset(of_rank)]
    are_some = 0 < len(odd) < len(in_order[at])
    who = named_ranks(odd, MOST_RANKS) if are_some else ""
    again = [step for step in range(at) if odd and all(in_order[step][rank] == in_order[at][rank] for rank in odd)]
    words = f"{who or 'ranks'} {'is' if are_some and len(odd) == 1 else 'are'}"
    is_resumed = any(record.is_of_new_model for record in steps[at].values())
    if not again or again[-1] == at - 1:  # a batch that is given twice in a row is no new epoch
        return words, 0, DifferentBatch(of_jobs=True, is_resumed=is_resumed)
    since = at - again[0]  # the other job may have the same rows in the first steps of the epoch by chance
    is_of_start = all(in_order[since + k][rank] == in_order[k][rank] for k in range(again[0]) for rank in odd)
    step = traced + again[0]
    cause = OrderBeginsAgain(step, who) if is_of_start else DifferentBatch(of_jobs=True, is_resumed=True)
    return words, step, cause


def _in_order(record: GivenRecord, shape: tuple[int, ...]) -> list[int]:
    """Return the checksums of the rows of a shape that a rank was given."""
    return [row for size, rows in zip(record.shapes, record.rows, strict=False) if size[1:] == shape for row in rows]


def _num_rows(step: Mapping[int, GivenRecord]) -> int:
    """Return how many rows all tensors of a step have, on all ranks."""
    return sum(math.prod(shape[:1]) for record in step.values() for shape in record.shapes)


def _are_padded_alike(now: Iterable[Mapping[int, GivenRecord]], first: Iterable[Mapping[int, GivenRecord]]) -> bool:
    """Whether all ranks are given rows of one shape, or each rank rows of the shapes that it had in the first step."""
    shapes_now, shapes_first = (
        [frozenset(shape[1:] for shape in record.shapes) for step in steps for record in step.values()]
        for steps in (now, first)
    )
    return shapes_now == shapes_first or len(set(shapes_now)) == 1


def steps_of(job: WholeJob) -> Steps:
    """Return what each rank was given in every step that all of them followed."""
    given = {rank: record.given for rank, record in job.records.items()}
    return [dict(zip(given, step, strict=True)) for step in zip(*given.values(), strict=False)]


def _rows_of(records: Iterable[GivenRecord]) -> RowsByShape:
    """Return the rows of a step on all ranks by the shape of a row; none of a shape of which some were not kept."""
    rows: RowsByShape = {}
    incomplete = set()
    for record in records:
        for shape, checksums in zip(record.shapes, record.rows, strict=False):
            rows.setdefault(shape[1:], set()).update(checksums)
            incomplete |= {shape[1:]} if len(checksums) < math.prod(shape[:1]) else set()
    return {shape: of_shape for shape, of_shape in rows.items() if shape not in incomplete}


def _of_settings(jobs: tuple[WholeJob, WholeJob], steps: tuple[Steps, Steps], at: int, before: str) -> Departure | None:
    """Return the difference of a step if optimizers on some ranks step with settings that are not the other job's."""
    job, (wanted, given) = jobs[1], steps
    options = _options_in(wanted[at])
    by_rank = {rank: different_options((options, options_in(own.options)), jobs) for rank, own in given[at].items()}
    different = ranks_by((rank, texts) for rank, texts in by_rank.items() if texts)
    if not different:
        return None
    number = job.steps_before + 1 + at
    texts, ranks = next(iter(different.items()))
    sentence = (
        f"{job.name}: in step {number} the optimizers on {named_ranks(ranks)} step with settings that are not the "
        f"other job's; all are equal {before}"
    )
    pace = pace_of(*([_options_in(step) for step in of_job] for of_job in steps)) if not job.steps_before else None
    on = named_ranks(ranks, MOST_RANKS) if len(ranks) < len(by_rank) else ""
    cause = DifferentSettings(texts, number, on=on) if pace is None else OtherPace(texts, *pace, number)
    return departure_for(cause, "sharded", "", sentence)


def _options_in(step: Mapping[int, GivenRecord]) -> Options:
    """Return the options with which all ranks step each parameter in a step."""
    return options_in(record for of_rank in step.values() for record in of_rank.options)
