"""The table of a step's collectives: how many, in which module, over how many ranks, how many bytes received."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.costs.comms import groups_text, received_by_axes, traffic
from shardviz.picture.text.tables.table import table
from shardviz.picture.text.terminal import line
from shardviz.text import printable

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.dump.costs.comms import Traffic
    from shardviz.dump.dump import Dump

HEADS = ("  collective", "module", "pass", "count", "bytes", "received", "group", "on ranks")


def comms_lines(dump: Dump) -> list[Text]:
    """Return the table of a step's collectives, axis by axis."""
    found = traffic(dump)
    if not found:
        return [line("no collectives ran in a step"), line("only a probe with a batch() runs a step")]
    lines: list[Text] = []
    for axes, most in received_by_axes(dump).items():
        heading = f"{groups_text(axes)}: each rank receives up to {most:,} bytes"
        rows = [_cells(one) for one in found if one.record.axes == axes]
        lines += [*([line("")] if lines else []), line((heading, "bold")), *table([HEADS, *rows], left=3)]
    return lines


def _cells(one: Traffic) -> list[str]:
    record = one.record
    numbers = (record.count, record.bytes, one.received)
    name, module = f"  {printable(record.op)}", printable(record.module) or "-"
    return [name, module, record.when, *(f"{number:,}" for number in numbers), str(record.size), str(len(one.ranks))]
