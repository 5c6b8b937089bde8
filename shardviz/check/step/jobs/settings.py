"""The numbers with which the optimizers of two jobs step: a learning rate, a decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.explain.step.two_jobs import DifferentSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.dump.records.step import OptionsRecord
    from shardviz.explain.finding import Finding

MAX_LISTED = 3

Options = dict[str, dict[str, str]]
RATE = "lr"
OPTIONS = (RATE, "weight_decay", "momentum", "betas", "eps", "dampening", "alpha", "rho")
"""Settings: other numbers in a group may be what the optimizer works out."""


def options_of(job: WholeJob) -> Options:
    """Return the options with which a job steps each parameter."""
    return options_in(record for of_rank in job.job.dump.files.ranks.values() for record in of_rank.options)


def options_in(records: Iterable[OptionsRecord]) -> Options:
    """Return the options of each parameter."""
    return {name: dict(record.options) for record in records for name in record.names}


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
    """Yield weights that the optimizers of two jobs step with other settings."""
    of_names: dict[str, list[tuple[str, str, str]]] = {}
    for name, each in _different((options_of(reference), options_of(job))):
        of_names.setdefault(name, []).append(each)
    for name, different in of_names.items():
        cause = DifferentSettings(_texts(different, (reference, job)))
        text = "the optimizers of the two jobs step it with different settings"
        yield cause.finding(name, tuple(job.job.ranks), text)
