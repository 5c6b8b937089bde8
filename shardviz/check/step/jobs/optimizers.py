"""What the optimizers of two jobs step with at the traced step: their settings, and the states that they keep.

A job that goes on from a checkpoint may have loaded the states of another rank, another weight or another step. Its
loss and its gradients are right, and only what the optimizer makes of them is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked, findings_in
from shardviz.check.step.comparison import Compared, Reason, compared, rounding_of, weight_of
from shardviz.check.step.jobs.assembly import Assembling, add_gradients, add_weight, are_whole
from shardviz.check.step.jobs.starts import coarsest_of
from shardviz.check.step.jobs.updates import Updates
from shardviz.check.step.update.states import of_others, state_in_another_order, state_of_parts
from shardviz.dump.records.step import STATES, STEPS, OptionsRecord
from shardviz.explain.checkpoints.states import StateInAnotherOrder, StateNotLoaded
from shardviz.explain.finding import Finding
from shardviz.explain.step.sums import GradientNotReduced
from shardviz.explain.step.two_jobs import DifferentSettings, DifferentStates, LostStates
from shardviz.explain.step.whole_step import RankDependentCode
from shardviz.explain.templates import number
from shardviz.explain.testing.transfers import StateByNumber
from shardviz.groups import in_groups
from shardviz.relate.factors import factor_of
from shardviz.relate.measures import owner_of
from shardviz.relate.tolerance import (
    ALIKE,
    EPSILON,
    EXPLAINED_UPDATE,
    FEW,
    MOST_NOISE,
    ROUNDINGS_OF_ONE,
    ROUNDINGS_OF_ROLE,
    STEP,
    UPDATE_OF_JOB,
)
from shardviz.relate.values import error_of, farthest, magnitude, root_mean_square
from shardviz.text import counted, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.starts import PartsByName, Weights
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.dump.dump import Dump

MAX_LISTED = 3

Options = dict[str, dict[str, str]]
RATE = "lr"
RATES = (RATE, "initial_lr")
OPTIONS = (RATE, "weight_decay", "momentum", "betas", "eps", "dampening", "alpha", "rho")
"""Settings: other numbers in a group may be what the optimizer works out."""


def is_one_resumed(first: WholeJob, second: WholeJob) -> bool:
    """Whether one of two jobs made fewer steps before the traced one, which begins with the same weights."""
    return first.steps_before != second.steps_before


def options_of(job: WholeJob) -> Options:
    """Return the options with which a job steps each parameter, and what some rank keeps of it."""
    return options_in(record for of_rank in job.records.values() for record in of_rank.options)


def options_in(records: Iterable[OptionsRecord]) -> Options:
    """Return what some records say of each parameter."""
    options: Options = {}
    for record in records:
        for name in record.names:
            options[name] = options.get(name, {}) | dict(record.options)
    return options


def different_options(options: tuple[Options, Options], jobs: tuple[WholeJob, WholeJob]) -> tuple[str, ...]:
    """Return the options that differ, the learning rate first: `lr (0.1 in the first run, 0.2 in the second run)`."""
    return _texts({each for _, each in _different(options)}, jobs)


def _texts(different: Iterable[tuple[str, str, str]], jobs: tuple[WholeJob, WholeJob]) -> tuple[str, ...]:
    ordered = sorted(different, key=lambda each: (OPTIONS.index(each[0]), each))
    texts = [f"{option} ({old} in {jobs[0].name}, {new} in {jobs[1].name})" for option, old, new in ordered]
    return tuple(texts[:MAX_LISTED])


def _different(options: tuple[Options, Options]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Yield each parameter with an option that differs, and its number in either job."""
    first, second = options
    for name in (name for name in first if name in second):
        for option, value in first[name].items():
            if option in OPTIONS and (other := second[name].get(option, value)) != value:
                yield name, (option, value, other)


def pace_of(wanted: Sequence[Options], given: Sequence[Options]) -> tuple[int, bool] | None:
    """Return how many times faster one job goes through the learning rates of the other, step by step, or slower.

    Returns:
        How many times, and whether it is slower. None unless two rates that the pace changes show it, and none is
        another, or if one multiple of all rates would do as well, as of a warm-up from 0.
    """
    if _is_multiple(wanted, given):
        return None
    rates = [[{name: values.get(RATE) for name, values in step.items()} for step in steps] for steps in (wanted, given)]
    for times in range(2, max(len(wanted), len(given))):
        for is_slower in (False, True):
            pairs = [(at // times if is_slower else at * times, at) for at in range(len(given))]
            known = [(there, at) for there, at in pairs if there < len(wanted)]
            fits = all(_are_equal_rates(rates[0][there], rates[1][at]) for there, at in known)
            moved = {at for there, at in known if at < len(wanted) and not _are_equal_rates(rates[0][at], rates[1][at])}
            if fits and len(moved) > 1:
                return times, is_slower
    return None


def _is_multiple(wanted: Sequence[Options], given: Sequence[Options]) -> bool:
    """Whether all rates of one job are the other's times one number."""
    pairs = [
        (float(there[name][RATE]), float(here[name][RATE]))
        for there, here in zip(wanted, given, strict=False)
        for name in there
        if RATE in there[name] and RATE in here.get(name, {})
    ]
    ratios = {round(ours / theirs, 6) for theirs, ours in pairs if theirs}
    return len(ratios) == 1 and all(theirs or not ours for theirs, ours in pairs)


def _are_equal_rates(wanted: Mapping[str, str | None], given: Mapping[str, str | None]) -> bool:
    names = wanted.keys() & given.keys()
    return bool(names) and all(wanted[name] == given[name] for name in names)


def different_settings(reference: WholeJob, job: WholeJob) -> Iterator[Finding]:
    """Yield weights that the optimizers of two jobs step with other settings, but for ranks that loaded no states."""
    records = {rank: options_in(record.options) for rank, record in job.records.items()}
    without = {rank for finding in states_on_some_ranks(job) for rank in finding.ranks}
    options = {name: own for rank, of_rank in records.items() if rank not in without for name, own in of_rank.items()}
    for name, different in in_groups(_different((options_of(reference), options))).items():
        cause = DifferentSettings(_texts(different, (reference, job)), is_resumed=is_one_resumed(reference, job))
        text = "the optimizers of the two jobs step it with different settings"
        yield cause.finding(name, tuple(job.ranks), text)


def states_on_some_ranks(job: WholeJob) -> Iterator[Finding]:
    """Yield that optimizers on some ranks begin the step without any state, and one on another rank has all.

    Where ranks share states, as ZeroRedundancyOptimizer's do, none has them all.
    """
    records = job.records.items()
    options = {rank: of_rank for rank, record in records if (of_rank := options_in(record.options))}
    kept = {rank: {name for name, values in of_rank.items() if STATES in values} for rank, of_rank in options.items()}
    full = next((rank for rank, names in kept.items() if len(names) > 1 and names == options[rank].keys()), None)
    without = [
        rank for rank, names in kept.items() if full is not None and not names and options[rank].keys() & kept[full]
    ]
    if full is not None and without:
        kinds = listed(dict.fromkeys(values[STATES] for values in options[full].values()), MAX_LISTED)
        who = f"{named_ranks(without, MAX_LISTED)} of {job.name}"
        text = f"the optimizer of rank {full} begins the step with {kinds}, and that of {who} with none"
        yield LostStates(who, f"rank {full}", kinds, is_of_ranks=True).finding("optimizer", tuple(without), text)


def lost_states(reference: WholeJob, job: WholeJob) -> Iterator[Finding]:
    """Yield that one of two jobs begins the step with states of its optimizers, and the other without any, or later.

    Weights and gradients are the same: one of them goes on from a checkpoint, and has loaded the weights alone.
    """
    jobs, options = (reference, job), (options_of(reference), options_of(job))
    of_jobs = [
        [values for name, values in of_job.items() if all(name in each for each in options)] for of_job in options
    ]
    kinds = [list(dict.fromkeys(values[STATES] for values in of_job if STATES in values)) for of_job in of_jobs]
    counts = [{values[STEPS] for values in of_job if STEPS in values} for of_job in of_jobs]
    if bool(kinds[0]) != bool(kinds[1]):
        other, without = jobs if kinds[0] else jobs[::-1]
        kept = listed(kinds[0] or kinds[1], MAX_LISTED)
        text = f"the optimizer of {other.name} begins the step with {kept}, and that of {without.name} with none"
        yield LostStates(without.name, other.name, kept).finding("optimizer", tuple(job.ranks), text)
    elif all(counts) and (steps := [max(count, key=float) for count in counts])[0] != steps[1]:
        texts = (f"{count} in {each.name}" for count, each in zip(steps, jobs, strict=True))
        cause = LostStates(job.name, reference.name, steps=" and ".join(texts))
        yield cause.finding("optimizer", tuple(job.ranks), f"its count of steps is {cause.steps}")
    else:
        yield from states_on_some_ranks(job)


@dataclass(frozen=True, slots=True)
class States:
    """One kind of state, of every weight.

    Attributes:
        states: What ranks have of each, beside the other job's.
        epsilon: The coarsest rounding of any of them.
        narrowest: The coarsest rounding of them and of what either job computes in.
        noise: What rounding in steps before may leave of a state that cancels.
        are_loaded: Whether no optimizer made a step before: all of it was loaded, and only a cast may round it.
    """

    states: Sequence[Compared]
    epsilon: float
    narrowest: float
    noise: float
    are_loaded: bool

    def wrong(self, state: Compared) -> tuple[int, ...]:
        """Return the ranks that have something else."""
        off = {rank: held - state.wanted_of(rank) for rank, held in state.reduced.items()}
        return tuple(rank for rank, apart in off.items() if not self._is_near(apart, state.wanted))

    def _is_near(self, apart: NDArray[np.float64], whole: NDArray[np.float64]) -> bool:
        if self.are_loaded:
            return magnitude(apart) <= max(STEP, ROUNDINGS_OF_ONE * self.epsilon) * magnitude(whole)
        most = (ALIKE if self.narrowest <= EPSILON["float32"] else MOST_NOISE) * root_mean_square(whole)
        return root_mean_square(apart) <= most or magnitude(apart) <= self.noise

    def why(self, state: Compared, ranks: tuple[int, ...]) -> Reason | None:
        """Return what ranks have instead; None if no rule says it."""
        others = {rank: owner for rank in ranks if (owner := owner_of(state, rank)) is not None}
        if len(others) == len(ranks):
            return of_others(others)
        if all(not np.any(state.reduced[rank]) for rank in ranks) and np.count_nonzero(state.wanted) >= FEW:
            return Reason(StateNotLoaded(), f"on {named_ranks(ranks, MAX_LISTED)} the optimizer's state is zeros")
        why = self._of_another_weight(state, ranks) or state_in_another_order(state, ranks) or _over_ranks(state)
        return why or (None if self.are_loaded else state_of_parts(state))

    def _of_another_weight(self, state: Compared, ranks: tuple[int, ...]) -> Reason | None:
        for other in self.states:
            is_alike = other is not state and other.wanted.shape == state.wanted.shape
            if is_alike and all(state.near(state.reduced[rank], state.part(other.wanted, rank)) for rank in ranks):
                weight = weight_of("optim", other.name)
                return Reason(StateByNumber(), f"the optimizer's state has the values of the other job's of {weight}")
        return None

    def finding(self, state: Compared, ranks: tuple[int, ...]) -> Finding:
        """Return the finding that ranks have something else."""
        held, wanted = state.reduced[ranks[0]], state.wanted_of(ranks[0])
        at = np.unravel_index(np.argmax(np.nan_to_num(np.abs(held - wanted), nan=np.inf)), held.shape)
        off = f"rank {ranks[0]} has {number(float(held[at]))} instead of {number(float(wanted[at]))}"
        if (reason := self.why(state, ranks)) is not None:
            return state.finding(reason.explanation, f"{reason.clause}; {off}", ranks).seen_in(state)
        where = f"on {len(ranks):,} of {len(state.reduced):,} ranks"
        text = f"the optimizer's state before the step is not the other job's {where}{_times(state, ranks)}: {off}"
        return state.finding(DifferentStates(self.are_loaded), text, ranks).seen_in(state)


def states_before(reference: WholeJob, job: WholeJob, weights: Weights) -> Updates:
    """Compare what optimizers keep of elements before the step with the other job's."""
    kinds, unlike, num_sampled = states_of(reference, job, weights)
    results: list[Finding | NotChecked] = []
    num_right = num_of_noise = 0
    for alike in kinds:
        for state in alike.states:
            ranks = alike.wrong(state)
            is_of_noise = bool(ranks) and _is_of_noise(state, weights)
            results += [alike.finding(state, ranks)] if ranks and not is_of_noise else []
            num_right += not ranks
            num_of_noise += is_of_noise
    if num_of_noise:
        why = f"{counted(num_of_noise, 'state')} of the optimizer: made of gradients that are rounding alone"
        results.append(NotChecked("", why, "step"))
    results += [NotChecked(state.name, f"the optimizer's state: {state.incomparable}", "step") for state in unlike]
    if num_sampled:
        why = f"{counted(num_sampled, 'state')} of the optimizer: only a sample of each was kept"
        results.append(NotChecked("", why, "step"))
    return Updates(tuple(results), num_right)


def _is_of_noise(state: Compared, weights: Weights) -> bool:
    """Whether the gradients of a state's weight were rounding alone in the steps before."""
    history = weights.histories.get(weight_of("optim", state.name))
    return history is not None and history.is_noise


def states_of(reference: WholeJob, job: WholeJob, weights: Weights) -> tuple[list[States], list[Compared], int]:
    """Return what optimizers keep before the step beside the other job's.

    Returns:
        The states of each kind, those that cannot be compared, and how many were not kept whole.
    """
    parts = job.weights("optim")
    there = reference.put_as_weights(weights.ways, "optim")
    names = [name for name in there if name in parts]
    whole = [name for name in names if are_whole(there[name], *parts[name].values())]
    assembling = Assembling(job, job.mesh)
    add_gradients(assembling, weights)  # with the places of weights that claim none
    for name in whole:
        belonging = weights.belongings.get(weight_of("optim", name))
        add_weight(assembling, min(job.ranks), name, ("reference", "optim"), there[name])
        for rank, state in parts[name].items():
            add_weight(assembling, rank, name, ("step", "optim"), state, belonging)
    dump = assembling.dump()
    states, coarsest = list(compared(dump, ("optim",))), EPSILON[coarsest_of((reference, job))]
    are_loaded = not reference.steps_before and not job.steps_before
    rounding = max(ROUNDINGS_OF_ROLE["grad"] * coarsest, rounding_of(dump).of_sums)
    kinds = []
    for of_kind in in_groups((kind_of_state(state), state) for state in states if not state.incomparable).values():
        noise = rounding * max(magnitude(state.wanted) for state in of_kind)
        epsilon = _epsilon_of(dump, of_kind)
        kinds.append(States(of_kind, epsilon, max(epsilon, coarsest), noise, are_loaded))
    return kinds, [state for state in states if state.incomparable], len(names) - len(whole)


def kind_of_state(state: Compared) -> str:
    """Return which kind of state it is, such as `exp_avg`."""
    return state.name.rpartition(".")[2]


def _epsilon_of(dump: Dump, states: Iterable[Compared]) -> float:
    """Return the coarsest rounding of some states in either job."""
    tensors = (dump.find(moment, "optim", state.name) for state in states for moment in ("step", "reference"))
    bodies = (shard.body for tensor in tensors if tensor is not None for shard in tensor.shards.values())
    return max(EPSILON.get(body.dtype, 0.0) for body in bodies)


def _over_ranks(state: Compared) -> Reason | None:
    """Return that ranks together have the numbers of the other job's state at other places, as one transposed."""
    held, wanted = (
        np.sort(np.concatenate([part.ravel() for part in parts]))
        for parts in (state.reduced.values(), map(state.wanted_of, state.reduced))
    )
    if len(held) < FEW or len(held) != len(wanted) or not state.near(held, wanted):
        return None
    return Reason(StateInAnotherOrder(), "ranks together have the numbers of the optimizer's state, at other places")


def _times(state: Compared, ranks: tuple[int, ...]) -> str:
    """Return the words that say which multiple of the other job's state ranks have; empty if it is none."""
    factors = {rank: factor_of(state.reduced[rank], state.wanted_of(rank)) for rank in ranks}
    scaled = [(state.reduced[rank], factor * state.wanted_of(rank)) for rank, factor in factors.items() if factor]
    is_multiple = len(scaled) == len(ranks) and all(error_of(*sides) <= EXPLAINED_UPDATE for sides in scaled)
    texts = dict.fromkeys(number(factor) for factor in factors.values() if factor)
    return f", but {next(iter(texts))} times that" if is_multiple and len(texts) == 1 else ""


def without_reduced_in_step(
    judged: Sequence[Finding | NotChecked], job: WholeJob, weights: Weights
) -> list[Finding | NotChecked]:
    """Return what was judged, without gradients of own rows whose weights are moved as they should be on all ranks.

    Optimizers may reduce a gradient themselves, or one that is right on one rank, which steps the weight and sends it.
    At least one weight must show that: Adam's first step moves a number alike on all ranks without any reduction.
    """
    harmless = GradientNotReduced | RankDependentCode
    unreduced = [one for one in findings_in(judged) if isinstance(one.explanation, harmless)]
    if not unreduced or any(isinstance(one, Finding) and one not in unreduced for one in judged):
        return list(judged)
    after, gradients = job.weights("param", "updated"), job.weights("grad")
    alike = [one for one in unreduced if _is_moved_alike(one.tensor, weights, after)]
    if not any(_is_moved_by_all(one.tensor, weights, gradients) for one in alike):
        return list(judged)
    return [one for one in judged if one not in alike]


def _is_moved_alike(name: str, weights: Weights, after: PartsByName) -> bool:
    """Whether the step moves a weight, and every rank's copy to where the other job's is."""
    before, wanted = weights.params.get(name), weights.updated.get(name)
    copies = [*after.get(name, {}).values()]
    if before is None or wanted is None or not are_whole(before, wanted, *copies) or len(copies) < 2:
        return False
    start, end, *held = [each.values.values for each in (before, wanted, *copies) if each.values is not None]
    moved = farthest(end, start)
    are_near = (own.shape == end.shape and farthest(own, end) <= UPDATE_OF_JOB * moved for own in held)
    return moved > 0 and all(are_near)


def _is_moved_by_all(name: str, weights: Weights, gradients: PartsByName) -> bool:
    """Whether a weight that moved alike shows a reduction: its ranks' gradients differ by more than sizes."""
    before, wanted = weights.params[name].values, weights.updated[name].values
    held = [part.values.values for part in gradients.get(name, {}).values() if part.values is not None]
    if before is None or wanted is None or not held:
        return False
    moved = np.abs(wanted.values - before.values)
    moved = moved[moved > 0]
    is_by_sign = float(np.ptp(moved)) <= UPDATE_OF_JOB * magnitude(moved)
    return not is_by_sign or any(not np.array_equal(np.sign(own), np.sign(held[0])) for own in held[1:])
