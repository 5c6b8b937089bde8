"""A step's collectives: by module and axes, with the bytes that each rank receives."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.layout.routes import ring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import CollectiveRecord

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective in one module, as the busiest of its ranks saw it.

    Attributes:
        record: What that rank wrote.
        ranks: The ranks that took part in one like it, rising.
    """

    record: CollectiveRecord
    ranks: tuple[int, ...]

    @property
    def received(self) -> int:
        """The bytes that the busiest rank receives."""
        return received_bytes(self.record)


def groups_text(axes: Sequence[str]) -> str:
    """Say along which axes groups of ranks run."""
    return f"along {' and '.join(axes)}" if axes else "over ranks that are not along any axis"


def received_bytes(record: CollectiveRecord) -> int:
    """Return the bytes that one rank receives in a ring: (n - 1) / n; twice that for all_reduce."""
    if record.op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        return ring(record.op, record.bytes, record.size)
    return 0 if record.op in ("send", "barrier") else record.bytes


def why_no_traffic(dump: Dump) -> str:
    """Say in a line why a dump has no collectives."""
    if dump.at("step"):
        return "a step ran, and no rank sent anything to another rank"
    return "no step was captured: only a probe with a batch() runs a step"


def traffic(dump: Dump) -> list[Traffic]:
    """Return the step's collectives, with one entry for those that are alike on all ranks."""
    groups: dict[tuple[object, ...], list[tuple[CollectiveRecord, tuple[int, ...]]]] = {}
    for rank, alike in dump.files.alike():
        records: dict[tuple[object, ...], CollectiveRecord] = {}
        for record in rank.collectives:
            key = (record.axes, record.op, record.module, record.when, record.size)
            records[key] = _together(records[key], record) if key in records else record
        for same, record in records.items():
            groups.setdefault(same, []).append((record, alike))
    return [_busiest(same) for same in groups.values()]


def _busiest(same: list[tuple[CollectiveRecord, tuple[int, ...]]]) -> Traffic:
    record = max((one for one, _ in same), key=lambda one: one.bytes)
    return Traffic(record, tuple(sorted(chain.from_iterable(ranks for _, ranks in same))))


def _together(one: CollectiveRecord, other: CollectiveRecord) -> CollectiveRecord:
    """Merge a rank's records of two groups along equal axes, such as a stage's two directions."""
    return structs.replace(one, count=one.count + other.count, bytes=one.bytes + other.bytes)


def received_by_axes(dump: Dump) -> dict[Axes, int]:
    """Return the bytes that the busiest rank receives, by a group's axes, single axes first."""
    most: dict[Axes, int] = {}
    for rank, _ in dump.files.alike():
        num_bytes: dict[Axes, int] = {}
        for record in rank.collectives:
            num_bytes[record.axes] = num_bytes.get(record.axes, 0) + received_bytes(record)
        for axes, count in num_bytes.items():
            most[axes] = max(most.get(axes, 0), count)
    return {axes: most[axes] for axes in sorted(most, key=lambda names: (len(names), names))}
