"""Steps for made dumps: collectives, schedules and what modules put out, written into the rank files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from shardviz.dump.read import read_files
from shardviz.dump.records.step import CollectiveRecord, StageRecord
from shardviz.dump.records.tensors import Body, TensorRecord
from shardviz.dump.write import write_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from shardviz.dump.records.files import RankRecord


def add_to_ranks(path: Path, change: Callable[[RankRecord], RankRecord]) -> None:
    """Write every rank file of a dump again."""
    for record in read_files(path).ranks.values():
        write_rank(path, change(record))


def add_collectives(path: Path, records: Sequence[CollectiveRecord]) -> None:
    """Let every rank take part in the same collectives."""
    add_to_ranks(path, lambda rank: structs.replace(rank, collectives=tuple(records)))


def add_moments(path: Path, module: str, before: Callable[[int], list[Any]], after: Callable[[int], list[Any]]) -> None:
    """Keep what a collective's module had before and after, by rank."""

    def kept(rank: RankRecord) -> RankRecord:
        lists = {f"{module}.before": before(rank.rank), module: after(rank.rank)}
        bodies = [
            Body("activation", "step", (len(numbers),), (len(numbers),), "float64", values=numbers)
            for numbers in lists.values()
        ]
        first = len(rank.bodies)
        tensors = [TensorRecord(name, first + number) for number, name in enumerate(lists)]
        return structs.replace(rank, bodies=(*rank.bodies, *bodies), tensors=(*rank.tensors, *tensors))

    add_to_ranks(path, kept)


def gpipe(ranks: int, microbatches: int) -> Mapping[int, tuple[StageRecord, ...]]:
    """Return the schedule in which all micro-batches go forward, and then back."""
    return {
        rank: tuple(StageRecord(rank, number, backward) for backward in (False, True) for number in range(microbatches))
        for rank in range(ranks)
    }
