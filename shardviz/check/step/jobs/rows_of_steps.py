"""Rows of the traced step that the job of one process has in other steps, or that no step of the other job has.

Rows are known by checksums. They are numbered as one process has them, through all steps that were followed: a sampler
that leaves rows out, and an optimizer that steps more or less often, show in these numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from shardviz.check.step.jobs.rows import shares_text
from shardviz.explain.step.batches import DifferentBatch, OwnOrder, RowsSplitTwice
from shardviz.explain.step.two_jobs import OtherStepLength
from shardviz.text import counted, join_numbers, named_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.step.jobs.rows import Rows
    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.dump.records.step import GivenRecord

    Numbers = tuple[int, ...]


FEWEST_STEPS = 2
"""In fewer steps rows do not show an order."""


@dataclass(frozen=True)
class Numbered:
    """The rows of two jobs' steps, numbered as one process has them.

    Attributes:
        size: How many rows it has in its first step.
        steps: The numbers that each rank of the other job has in every step; only those of its first steps that one
            process has, too.
    """

    size: int
    steps: Sequence[Mapping[int, Numbers]]

    def rows(self, at: int) -> list[int]:
        """Return what all ranks have in a step."""
        shares = dict.fromkeys(self.steps[at].values())
        return [row for share in shares for row in share]


def with_other_steps(rows: Rows, reference: WholeJob, job: WholeJob) -> Rows:
    """Return rows that differ for no known reason with the numbers that they have, and what these tell."""
    is_unknown = rows.cause == DifferentBatch(of_jobs=True)
    if is_unknown and (of_own := _in_own_order(reference, job)) is not None:
        return replace(rows, problem=of_own[0], cause=of_own[1])
    numbered = _numbered(reference, job) if is_unknown else None
    if numbered is None:
        return rows
    given = numbered.rows(0)
    shares = f"its ranks were given these of the other job's rows: {shares_text(numbered.steps[0])}"
    if (length := _other_length(numbered, job)) is not None:
        if length.rows < length.wanted:
            then = f"rows {join_numbers(set(range(numbered.size)) - set(given))} come in its next steps"
            return replace(rows, problem=f"{shares}; {then}", cause=length)
        steps = f"the other job has these in {length.times} steps of {length.wanted} rows"
        return replace(rows, problem=f"{shares}; {steps}", cause=length)
    if max(given) < numbered.size:
        return rows
    problem = f"{shares} (numbered through its steps of {numbered.size} rows)"
    if times := _part_of_rows(numbered):
        left_out = set(range(times * len(given))) - set(given)
        clause = f"no step of {job.name} that was followed has rows {join_numbers(left_out)}"
        ranks = len(set(numbered.steps[0].values()))
        cause = RowsSplitTwice(times, is_every=_is_every(given, times), is_of_ranks=times == ranks)
        return replace(rows, problem=f"{problem}; {clause}", cause=cause)
    return replace(rows, problem=problem)


def _in_own_order(reference: WholeJob, job: WholeJob) -> tuple[str, OwnOrder] | None:
    """Return that ranks are given rows of other steps, or of other ranks, while one process has every row once.

    Returns:
        What they are given, and the cause; None if rows don't show it.
    """
    per_call, *of_ranks = (_tensors_per_call(each, rank) for each in (reference, job) for rank in each.ranks)
    if (
        not reference.is_of_one
        or reference.steps_before != job.steps_before
        or {*of_ranks} != {per_call}
        or not per_call
    ):
        return None
    ((_, record),) = reference.records.items()
    count = min(len(each.given) for each in (record, *job.records.values()))
    tensor = max(range(per_call), key=lambda at: math.prod(record.given[0].shapes[at][1:]))
    every = [_rows_of(given, tensor, per_call) for given in record.given[:count]]
    step_of = {row: step for step, rows in enumerate(every) for row in rows}
    given = {
        rank: [_rows_of(each, tensor, per_call) for each in own.given[:count]] for rank, own in job.records.items()
    }
    if len(step_of) < sum(map(len, every)) or not all(all(steps) for steps in (every, *given.values())):
        return None
    odd = [
        rank
        for rank, steps in given.items()
        if any(step_of.get(row) != at for at, of in enumerate(steps) for row in of)
    ]
    sets = {rank: {row for rows in steps for row in rows} for rank, steps in given.items()}
    is_once = all(len(sets[rank]) == sum(map(len, steps)) for rank, steps in given.items())
    shared = {row for first, second in combinations(sets.values(), 2) for row in first & second}
    moved = [sum(step_of.get(row, at) != at for at, of in enumerate(given[rank]) for row in of) for rank in odd]
    if count < FEWEST_STEPS or not odd or not is_once or not shared or not all(moved):
        return None
    who = named_ranks(odd) if len(odd) < len(given) else ""
    text = (
        f"{named_ranks(odd)} {'was' if len(odd) == 1 else 'were'} given rows that the other job has in other steps: "
        f"{sum(moved)} of the {sum(len(of) for rank in odd for of in given[rank])} in {count} steps; "
        f"{counted(len(shared), 'row')} came on several ranks"
    )
    return text, OwnOrder(who)


def _numbered(reference: WholeJob, job: WholeJob) -> Numbered | None:
    """Return both jobs' rows; None if one process has some of them twice, or none of those in the traced step."""
    if not reference.is_of_one or reference.steps_before != job.steps_before:
        return None
    per_call, *of_ranks = (_tensors_per_call(each, rank) for each in (reference, job) for rank in each.ranks)
    if not per_call or {*of_ranks} != {per_call}:
        return None
    ((_, record),) = reference.records.items()
    shapes = record.given[0].shapes[:per_call]
    for tensor in sorted(range(per_call), key=lambda at: -math.prod(shapes[at][1:])):
        every = [_rows_of(given, tensor, per_call) for given in record.given]
        numbers = {row: number for number, row in enumerate(row for rows in every for row in rows)}
        if not every[0] or len(numbers) < sum(map(len, every)):
            continue
        steps: list[dict[int, Numbers]] = []
        for step in zip(*(of_rank.given for of_rank in job.records.values()), strict=False):
            rows = {rank: _rows_of(given, tensor, per_call) for rank, given in zip(job.records, step, strict=True)}
            if not all(of_rank and numbers.keys() >= set(of_rank) for of_rank in rows.values()):
                break
            steps.append({rank: tuple(numbers[row] for row in of_rank) for rank, of_rank in rows.items()})
        return Numbered(len(every[0]), steps) if steps else None
    return None


def _tensors_per_call(job: WholeJob, rank: int) -> int:
    """Return how many tensors each call of the model is given in the traced step; 0 if that is not known."""
    given = job.records[rank].given
    count, rest = divmod(len(given[0].shapes) if given else 0, max(job.ranks[rank].counts.get("", 1), 1))
    return 0 if rest else count


def _rows_of(given: GivenRecord, tensor: int, per_call: int) -> list[int]:
    """Return the checksums of the rows of one of the model's tensors in all calls of a step; none if some lack."""
    every = list(zip(given.shapes, given.rows, strict=False))[tensor::per_call]
    is_known = len(given.rows) == len(given.shapes) and all(len(rows) == math.prod(shape[:1]) for shape, rows in every)
    return [row for _, rows in every for row in rows] if is_known else []


def _other_length(numbered: Numbered, job: WholeJob) -> OtherStepLength | None:
    """Return that several steps of one job have together the rows of one step of the other, one after the other."""
    given, size = numbered.rows(0), numbered.size
    count = len(given)
    if count == size or len(set(given)) < count:
        return None
    long, short = max(count, size), min(count, size)
    times, rest = divmod(long, short)
    num_steps = times if count < size else 1
    together = [row for at in range(min(num_steps, len(numbered.steps))) for row in numbered.rows(at)]
    if rest or sorted(together) != list(range(long)):
        return None
    is_apart = any(wrapper.kind == "no_sync" for wrapper in job.wrappers)
    return OtherStepLength(job.name, count, size, times, is_apart and count < size)


def _part_of_rows(numbered: Numbered) -> int:
    """Return of how many rows the other job has one, if it leaves the others out evenly and for good; else 0."""
    first, *later = map(numbered.rows, range(len(numbered.steps)))
    count, ranks = len(first), len(set(numbered.steps[0].values()))
    times = (max(first) + count) // count
    window, block = times * count, times * ranks
    is_even = (
        times > 1
        and not window % block
        and Counter(row // block for row in first) == dict.fromkeys(range(window // block), ranks)
    )
    is_next = bool(later) and all(window <= row < 2 * window for row in later[0])
    is_again = any(row < window for rows in later for row in rows)
    return times if is_even and is_next and not is_again and len(set(first)) == count == len(later[0]) else 0


def _is_every(given: Sequence[int], times: int) -> bool:
    """Whether rows are so many apart."""
    return sorted(given) == list(range(min(given), min(given) + times * len(given), times))


def moved_by(
    reference: WholeJob,
    wanted: Sequence[Mapping[int, GivenRecord]],
    given: Sequence[Mapping[int, GivenRecord]],
    at: int,
    shape: tuple[int, ...],
) -> str:
    """Return in words that all rows of a later step come equally many rows too early or too late; empty if they don't.

    If a job goes on there with a new model, as from a checkpoint, and begins at a share of the rows that were read, the
    words say this, too: a rank counts its own rows.

    Args:
        reference: The job of one process.
        wanted: What its rank was given in every step.
        given: What the other job's ranks were given.
        at: The step.
        shape: The shape of these rows.
    """
    order = [[row for record in step.values() for row in _of_shape(record, shape)] for step in wanted]
    numbers = {row: number for number, row in enumerate(row for rows in order for row in rows)}
    here = [row for record in given[at].values() for row in _of_shape(record, shape)]
    start, count = sum(map(len, order[:at])), len(order[at])
    if len(wanted[at]) != 1 or len(numbers) < sum(map(len, order)) or len(here) != count:
        return ""
    places = sorted(numbers.get(row, -1) for row in here)
    begin = places[0] if places else -1
    if begin < 0 or begin == start or places != list(range(begin, begin + count)):
        return ""
    off = f", {abs(begin - start)} rows {'earlier' if begin < start else 'later'} in its order"
    is_new = all(record.is_of_new_model for record in given[at].values())
    ranks = len(given[at])
    if is_new and not reference.steps_before and ranks > 1 and begin * ranks == start:
        return f"{off} (it goes on at row {begin} after {start} were read, as if it counted one rank's of {ranks})"
    return off


def _of_shape(record: GivenRecord, shape: tuple[int, ...]) -> list[int]:
    """Return the checksums of a rank's rows of a shape, of the first tensor of each call that has such rows."""
    return [row for size, rows in zip(record.shapes, record.rows, strict=False) if size[1:] == shape for row in rows]
