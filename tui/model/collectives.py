"""A step as plain data: its collectives with identical layers folded, its pipeline, numbers before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.costs.comms import received, received_by_axes, traffic
from shardviz.dump.costs.timeline import Timeline, timeline_of
from shardviz.errors import ShardvizError
from shardviz.text import Fold, fold, natural_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import CollectiveRecord


WHAT = {
    "all_gather": "each rank gets the parts of all ranks",
    "all_reduce": "each rank gets the sum over all ranks",
    "all_to_all": "each rank sends a part to every other rank",
    "barrier": "each rank waits until all have arrived",
    "broadcast": "each rank gets a copy of one rank's tensor",
    "gather": "one rank gets the parts of all ranks",
    "recv": "one rank receives from another",
    "reduce": "one rank gets the sum over all ranks",
    "reduce_scatter": "each rank gets its part of the sum over all ranks",
    "scatter": "each rank gets its part of one rank's tensor",
    "send": "one rank sends to another",
}
"""The effect of each collective within a group, by torch's name for it."""

BEFORE = ".before"
"""The part of a module that outputs a rank's numbers before the module's collective ran."""


@dataclass(frozen=True)
class Collective:
    """The collectives of a step that are alike, in a module or in identical layers.

    Attributes:
        record: The busiest rank's record of those in one module, without the module's name.
        modules: The modules.
        ranks: The ranks that took part, rising.
    """

    record: CollectiveRecord
    modules: Fold
    ranks: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many there were in all modules."""
        return self.record.count * len(self.modules)

    @property
    def bytes(self) -> int:
        """The bytes of all of them together."""
        return self.record.bytes * len(self.modules)

    @property
    def received(self) -> int:
        """The bytes that each rank receives."""
        return received(self.record) * len(self.modules)


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        has_run: Whether the dump has a step at all.
        collectives: Its collectives, in the order in which they began.
        received: By axes: the bytes that the busiest rank took in along them; an axis without collectives has none.
        pipeline: The schedule of a pipeline's ranks in time; None where none ran.
        undrawn: Why a schedule that is there cannot be laid out; empty where it can.
    """

    has_run: bool
    collectives: tuple[Collective, ...] = ()
    received: tuple[tuple[tuple[str, ...], int], ...] = ()
    pipeline: Timeline | None = None
    undrawn: str = ""


def step_of(dump: Dump) -> Step:
    """Return the step of a dump."""
    ranks = dump.files.ranks.values()
    has_run = bool(dump.at("step")) or any(rank.collectives or rank.schedule for rank in ranks)
    pipeline, undrawn = None, ""
    try:
        pipeline = timeline_of(dump)
    except ShardvizError as error:
        undrawn = f"{error.message}: {error.hint}"
    return Step(has_run, tuple(_collectives(dump)), tuple(_received(dump)), pipeline, undrawn)


def _collectives(dump: Dump) -> list[Collective]:
    records = [(item.record.module, (structs.replace(item.record, module=""), item.ranks)) for item in traffic(dump)]
    began = {item: at for at, item in reversed([*enumerate(records)])}
    folds = fold(sorted(records, key=lambda item: natural_key(item[0])))
    folds.sort(key=lambda item: min(began[name, item[1]] for name in item[0].names()))
    return [Collective(record, modules, ranks) for modules, (record, ranks) in folds]


def _received(dump: Dump) -> list[tuple[tuple[str, ...], int]]:
    """Return the bytes that the busiest rank took in: along every axis, then along other groups."""
    unused = {(axis,): 0 for axis in dump.files.mesh.axes if dump.files.run.mesh}
    return list((unused | received_by_axes(dump)).items())


def axes_text(axes: Sequence[str]) -> str:
    """Write the axes along which a group runs; a group along none may be any ranks."""
    return ", ".join(axes) or "no axis"


@dataclass(frozen=True)
class Moment:
    """The numbers of a rank before a collective and after it.

    Attributes:
        rank: The rank.
        before: The numbers; None where they were not kept.
        after: The numbers; None where they were not kept.
    """

    rank: int
    before: tuple[float, ...] | None
    after: tuple[float, ...] | None


def moments(dump: Dump, collective: Collective) -> list[Moment]:
    """Return every rank's numbers before and after, where its module kept both, as a collective probe's modules do."""
    name = collective.modules.names()[0]
    before, after = (dump.find("step", "activation", module) for module in (name + BEFORE, name))
    if before is None or after is None:
        return []
    return [
        Moment(rank, _numbers(dump, name + BEFORE, rank), _numbers(dump, name, rank))
        for rank in _by_group(dump, collective)
    ]


def _by_group(dump: Dump, collective: Collective) -> list[int]:
    """Return the ranks that took part, group by group."""
    axes, mesh = collective.record.axes, dump.files.mesh
    if not axes or not set(axes) <= set(mesh.axes):
        return list(collective.ranks)
    took_part = frozenset(collective.ranks)
    return [rank for group in mesh.groups(*axes) for rank in group if rank in took_part]


def _numbers(dump: Dump, name: str, rank: int) -> tuple[float, ...] | None:
    tensor = dump.find("step", "activation", name)
    if tensor is None or rank not in tensor.shards:
        return None
    try:
        return tuple(dump.values(tensor.shards[rank], name).ravel().tolist())
    except ShardvizError:
        return None
