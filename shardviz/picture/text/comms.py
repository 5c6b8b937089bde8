"""The collectives of a step by axis: how many, in which module, over how many ranks, and what a rank receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.layout.routes import ring
from shardviz.picture.text.memory import table
from shardviz.picture.text.terminal import line
from shardviz.text import printable

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.dump.dump import Dump
    from shardviz.dump.records import CollectiveRecord


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective in one module, as the busiest of its ranks saw it.

    Attributes:
        record: What that rank wrote.
        ranks: The ranks that took part in one like it, rising.
    """

    record: CollectiveRecord
    ranks: tuple[int, ...]


def received(record: CollectiveRecord) -> int:
    """Return the bytes that a rank takes in; collectives are counted as rings."""
    if record.op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        return ring(record.op, record.bytes, record.size)
    return 0 if record.op in ("send", "barrier") else record.bytes


def traffic(dump: Dump) -> list[Traffic]:
    """Return the step's collectives, those of all ranks that are alike together."""
    found: dict[tuple[object, ...], dict[int, CollectiveRecord]] = {}
    for number, rank in sorted(dump.files.ranks.items()):
        for record in rank.collectives:
            key = (record.axes, record.op, record.module, record.when, record.size)
            by_rank = found.setdefault(key, {})
            by_rank[number] = _together(by_rank[number], record) if number in by_rank else record
    return [Traffic(max(by_rank.values(), key=lambda one: one.bytes), tuple(by_rank)) for by_rank in found.values()]


def _together(one: CollectiveRecord, other: CollectiveRecord) -> CollectiveRecord:
    """Join what a rank wrote of two of its groups along the same axes, as a pipeline's stage has one each way."""
    return structs.replace(one, count=one.count + other.count, bytes=one.bytes + other.bytes)


def comms_lines(dump: Dump) -> list[Text]:
    """Return the table of a step's collectives, axis by axis."""
    found = traffic(dump)
    if not found:
        return [line("no collective ran in a step"), line("a probe with a batch() is stepped; a captured job is not")]
    axes = list(dict.fromkeys(one.record.axes for one in found))
    lines: list[Text] = []
    for group in sorted(axes, key=lambda names: (len(names), names)):
        own = [one for one in found if one.record.axes == group]
        where = "along " + " and ".join(group) if group else "over ranks that are no axis"
        heading = f"{where}: up to {_most(dump, group)} bytes received by a rank"
        lines += [*([line("")] if lines else []), line((heading, "bold")), *_table(own)]
    return lines


def _most(dump: Dump, axes: tuple[str, ...]) -> str:
    ranks = dump.files.ranks.values()
    return f"{max(sum(received(one) for one in rank.collectives if one.axes == axes) for rank in ranks):,}"


def _table(own: list[Traffic]) -> list[Text]:
    rows = [["  collective", "module", "pass", "count", "bytes", "received", "group", "on ranks"]]
    rows += [
        [
            f"  {printable(one.record.op)}",
            printable(one.record.module) or "-",
            one.record.when,
            f"{one.record.count:,}",
            f"{one.record.bytes:,}",
            f"{received(one.record):,}",
            str(one.record.size),
            str(len(one.ranks)),
        ]
        for one in own
    ]
    return table(rows, left=3)
