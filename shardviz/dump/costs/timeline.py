"""A pipeline's schedule as a timeline: every pass at its earliest time, and the bubble.

The order on each rank is the real one. Time is counted in forward passes of one stage; a backward takes two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import StageRecord

FORWARD, BACKWARD = 1, 2
"""How long a pass takes."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""A rank's first stage, its second, ...: small letters run forward, capitals backward."""

Pass = tuple[int, int, bool]
"""Stage, micro-batch, whether backward."""


@dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Attributes:
        begins: For every rank, in its order: each pass with the time at which it begins.
        length: When the last pass ends.
    """

    begins: Mapping[int, tuple[tuple[StageRecord, int], ...]]
    length: int

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches there are."""
        return 1 + max(record.microbatch for passes in self.begins.values() for record, _ in passes)

    @cached_property
    def stages(self) -> dict[int, list[int]]:
        """The stages that each rank ran, rising."""
        return {rank: sorted({record.stage for record, _ in passes}) for rank, passes in self.begins.items()}

    @property
    def stages_per_rank(self) -> int:
        """How many stages the rank with most of them has."""
        return max(map(len, self.stages.values()))

    def label(self, rank: int, record: StageRecord) -> str:
        """Label one pass of a rank: a letter for the stage, then the micro-batch."""
        letter = LETTERS[self.stages[rank].index(record.stage) % len(LETTERS)]
        return f"{letter.upper() if record.backward else letter}{record.microbatch}"

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they are idle."""
        busy = sum(duration(record) for passes in self.begins.values() for record, _ in passes)
        return 1 - busy / (self.length * len(self.begins))

    @property
    def formula(self) -> float:
        """The bubble by the closed formula, (p - 1) / (v m + p - 1)."""
        ranks = len(self.begins)
        return (ranks - 1) / (self.stages_per_rank * self.num_microbatches + ranks - 1)


def duration(record: StageRecord) -> int:
    """Return how long a pass takes."""
    return BACKWARD if record.backward else FORWARD


def timeline_of(dump: Dump) -> Timeline | None:
    """Return the timeline of the pipeline that the lowest rank is in; None if no pipeline ran.

    Of the ranks that ran the same stages, only the lowest is kept.

    Raises:
        ShardvizError: Some pass waits for one that no rank ran before.
    """
    schedules: dict[frozenset[int], tuple[int, Sequence[StageRecord]]] = {}
    for record, ranks in sorted(dump.files.alike(), key=lambda one: one[1]):
        if record.schedule:
            schedules.setdefault(frozenset(one.stage for one in record.schedule), (ranks[0], record.schedule))
    return timeline(dict(sorted(schedules.values(), key=lambda one: one[0]))) if schedules else None


def timeline(schedules: Mapping[int, Sequence[StageRecord]]) -> Timeline:
    """Let every pass begin as soon as its rank is free and the passes that it needs have ended.

    Args:
        schedules: The passes of each rank of one pipeline, in order.

    Raises:
        ShardvizError: Some pass waits for one that no rank ran before.
    """
    last = max(record.stage for records in schedules.values() for record in records)
    ended: dict[Pass, int] = {}
    begins: dict[int, list[tuple[StageRecord, int]]] = {rank: [] for rank in schedules}
    free = dict.fromkeys(schedules, 0)
    waiting = True
    while waiting:
        waiting = False
        for rank, records in schedules.items():
            while len(begins[rank]) < len(records):
                record = records[len(begins[rank])]
                needed = _needed(record, last)
                if any(one not in ended for one in needed):
                    break
                begin = max([free[rank], *(ended[one] for one in needed)])
                begins[rank].append((record, begin))
                free[rank] = begin + duration(record)
                ended[record.stage, record.microbatch, record.backward] = free[rank]
                waiting = True
    late = [rank for rank, records in schedules.items() if len(begins[rank]) < len(records)]
    if late:
        record = schedules[late[0]][len(begins[late[0]])]
        raise ShardvizError(
            f"rank {late[0]} ran stage {record.stage} on micro-batch {record.microbatch} before its inputs",
            "the dump lacks a rank of the pipeline",
        )
    return Timeline({rank: tuple(passes) for rank, passes in begins.items()}, max(free.values()))


def _needed(record: StageRecord, last: int) -> list[Pass]:
    """Return the passes whose results a pass needs."""
    stage, microbatch = record.stage, record.microbatch
    if not record.backward:
        return [(stage - 1, microbatch, False)] if stage else []
    later: list[Pass] = [(stage + 1, microbatch, True)] if stage < last else []
    return [(stage, microbatch, False), *later]
