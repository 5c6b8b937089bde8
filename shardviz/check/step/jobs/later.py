"""Steps after the traced one: the first in which two jobs are given different rows, or step with other settings.

Rows are known by checksums, and compared if all that are of their shape agree in the traced step: what ranks pad, crop
or split in ways of their own has other checksums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.check.step.jobs.optimizers import different_options, options_in
from shardviz.check.step.runs.departure import Departure, departure_for
from shardviz.explain.step.two_jobs import DifferentSettings
from shardviz.explain.step.whole_step import DifferentBatch, OrderBeginsAgain
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.dump.records.step import GivenRecord

    Steps = list[dict[int, GivenRecord]]


MOST_RANKS = 4
"""Ranks that are listed."""


@dataclass(frozen=True, slots=True)
class LaterResult:
    """Steps after the traced one.

    Attributes:
        departure: What differs in the first of them in which something does; None if nothing does.
        count: In how many settings were compared.
        with_rows: In how many of these rows were.
        new_at: The first step of a model that both jobs go on with in the place of the traced one; 0 if there is none.
    """

    departure: Departure | None = None
    count: int = 0
    with_rows: int = 0
    new_at: int = 0


def later_steps_of(reference: WholeJob, job: WholeJob) -> LaterResult:
    """Compare what both jobs were given in the steps that both followed."""
    wanted, given = _steps_of(reference), _steps_of(job)
    if not wanted or not given:
        return LaterResult()
    traced, with_rows, new_at = job.steps_before + 1, 0, 0
    rows, rows_there = ([_rows_of(step.values()) for step in steps] for steps in (given, wanted))
    alike = {shape for shape, ours in rows_there[0].items() if ours == rows[0].get(shape)}
    for at in range(1, min(len(given), len(wanted))):
        number = traced + at
        is_new = any(record.is_of_new_model for step in (wanted[at], given[at]) for record in step.values())
        new_at = new_at or (number if is_new else 0)
        before = "in the step before" if at == 1 else f"in the {at} steps before"
        if (different := _different_settings(wanted[at], given[at], (reference, job))) is not None:
            rank, texts = different
            sentence = (
                f"{job.name}: in step {number} the optimizers on rank {rank} step with settings that are not the other "
                f"job's; all are equal {before}"
            )
            return LaterResult(departure_for(DifferentSettings(texts, number), "sharded", "", sentence))
        if _num_rows(wanted[at]) < _num_rows(wanted[0]) or _num_rows(given[at]) < _num_rows(given[0]):
            continue  # the last rows, which samplers fill up or leave out
        if not _are_padded_alike((wanted[at], given[at]), (wanted[0], given[0])):
            continue  # a loader pads each rank's rows to the longest of them
        shapes = sorted(alike & rows_there[at].keys() & rows[at].keys())
        with_rows += bool(shapes)
        for shape in (shape for shape in shapes if rows[at][shape] != rows_there[at][shape]):
            steps_there = [
                traced + step for step, each in enumerate(rows_there) if rows[at][shape] <= each.get(shape, set())
            ]
            has = f"has, in step {steps_there[0]}" if steps_there else "does not have in it"
            ranks, cause = _given_again(given, at, (shape, rows_there[at][shape]), traced)
            what = f"rows that the other job {has}"
            if isinstance(cause, OrderBeginsAgain):
                what = f"the rows of step {cause.step} again, in the same order, and the other job has others"
            text = f"{job.name}: in step {number} {ranks} given {what}; all are equal {before}"
            return LaterResult(departure_for(cause, "batch", "", text))
    return LaterResult(None, min(len(given), len(wanted)) - 1, with_rows, new_at)


def _given_again(
    steps: Steps, at: int, wanted: tuple[tuple[int, ...], set[int]], traced: int
) -> tuple[str, OrderBeginsAgain | DifferentBatch]:
    """Return which ranks are given other rows than the other job has, in words, and why.

    Args:
        steps: What each rank was given in every step.
        at: The step.
        wanted: The shape of a row, and the rows that the other job has.
        traced: The number of the first step.
    """
    shape, rows = wanted
    in_order = [{rank: _in_order(record, shape) for rank, record in step.items()} for step in steps[: at + 1]]
    odd = [rank for rank, of_rank in in_order[at].items() if not rows.issuperset(of_rank)]
    are_some = 0 < len(odd) < len(in_order[at])
    who = named_ranks(odd, MOST_RANKS) if are_some else ""
    again = [step for step in range(at) if odd and all(in_order[step][rank] == in_order[at][rank] for rank in odd)]
    is_new_epoch = bool(again) and again[-1] < at - 1  # a batch that is given twice in a row is no new epoch
    cause = OrderBeginsAgain(traced + again[0], who) if is_new_epoch else DifferentBatch(of_jobs=True)
    return f"{who or 'ranks'} {'is' if are_some and len(odd) == 1 else 'are'}", cause


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


def _steps_of(job: WholeJob) -> Steps:
    """Return what each rank was given in every step that all of them followed."""
    given = {rank: record.given for rank, record in job.job.dump.files.ranks.items()}
    return [dict(zip(given, step, strict=True)) for step in zip(*given.values(), strict=False)]


def _rows_of(records: Iterable[GivenRecord]) -> dict[tuple[int, ...], set[int]]:
    """Return the rows of a step on all ranks by the shape of a row; none of a shape of which some were not kept."""
    rows: dict[tuple[int, ...], set[int]] = {}
    incomplete = set()
    for record in records:
        for shape, checksums in zip(record.shapes, record.rows, strict=False):
            rows.setdefault(shape[1:], set()).update(checksums)
            incomplete |= {shape[1:]} if len(checksums) < math.prod(shape[:1]) else set()
    return {shape: of_shape for shape, of_shape in rows.items() if shape not in incomplete}


def _different_settings(
    wanted: Mapping[int, GivenRecord], given: Mapping[int, GivenRecord], jobs: tuple[WholeJob, WholeJob]
) -> tuple[int, tuple[str, ...]] | None:
    """Return the first rank whose optimizers step with other settings, and these; None if there is none."""
    first = options_in(record for of_rank in wanted.values() for record in of_rank.options)
    for rank, of_rank in given.items():
        if texts := different_options((first, options_in(of_rank.options)), jobs):
            return rank, texts
    return None
