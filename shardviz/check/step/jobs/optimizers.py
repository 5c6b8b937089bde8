"""What the optimizers of two jobs step with at the traced step: their settings, and the states that they keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.records.step import STATES, STEPS, OptionsRecord
from shardviz.explain.step.two_jobs import DifferentSettings, LostStates
from shardviz.groups import in_groups
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.explain.finding import Finding

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
    return options_in(record for of_rank in job.job.dump.files.ranks.values() for record in of_rank.options)


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


def different_settings(reference: WholeJob, job: WholeJob) -> Iterator[Finding]:
    """Yield weights that the optimizers of two jobs step with other settings, but for ranks that loaded no states."""
    records = {rank: options_in(record.options) for rank, record in job.job.dump.files.ranks.items()}
    without = {rank for finding in states_on_some_ranks(job) for rank in finding.ranks}
    options = {name: own for rank, of_rank in records.items() if rank not in without for name, own in of_rank.items()}
    for name, different in in_groups(_different((options_of(reference), options))).items():
        cause = DifferentSettings(_texts(different, (reference, job)), is_resumed=is_one_resumed(reference, job))
        text = "the optimizers of the two jobs step it with different settings"
        yield cause.finding(name, tuple(job.job.ranks), text)


def states_on_some_ranks(job: WholeJob) -> Iterator[Finding]:
    """Yield that optimizers on some ranks begin the step without any state, and one on another rank has all.

    Where ranks share states, as ZeroRedundancyOptimizer's do, none has them all.
    """
    records = job.job.dump.files.ranks.items()
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
        yield LostStates(without.name, other.name, kept).finding("optimizer", tuple(job.job.ranks), text)
    elif all(counts) and (steps := [max(count, key=float) for count in counts])[0] != steps[1]:
        texts = (f"{count} in {each.name}" for count, each in zip(steps, jobs, strict=True))
        cause = LostStates(job.name, reference.name, steps=" and ".join(texts))
        yield cause.finding("optimizer", tuple(job.job.ranks), f"its count of steps is {cause.steps}")
    else:
        yield from states_on_some_ranks(job)
