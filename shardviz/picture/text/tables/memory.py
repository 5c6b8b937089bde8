"""The tables of memory, bytes per rank by role and by tensor beside closed formulas, and of a step's collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.costs.comms import groups_text, received_by_axes, traffic
from shardviz.dump.costs.memory import memory_table
from shardviz.picture.text.tables.table import table
from shardviz.picture.text.terminal import DIM, line
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.text import Text

    from shardviz.dump.costs.comms import Traffic
    from shardviz.dump.costs.memory import MemoryTable
    from shardviz.dump.dump import Dump

MAX_RANKS = 16
MAX_NAMES = 40
HEADS = ("  collective", "module", "pass", "count", "bytes", "received", "group", "on ranks")


def memory_lines(dump: Dump, *, all_ranks: bool = False) -> list[Text]:
    """Return the tables of the memory that a run's tensors take.

    Args:
        dump: The dump.
        all_ranks: Whether every rank and every tensor has a line, however many there are.
    """
    found = memory_table(dump)
    if not found.uses:
        return [line("the dump has no tensors that take memory")]
    return [
        *_by_rank(found, all_ranks=all_ranks),
        *_under_way(found),
        line(""),
        *_by_tensor(found, all_names=all_ranks),
        line(""),
        *_formulas(found, dump.files.run.num_ranks),
    ]


def _by_rank(found: MemoryTable, *, all_ranks: bool) -> list[Text]:
    named = [(f"rank {rank}", sizes) for rank, sizes in found.by_rank.items()]
    shown = named if all_ranks else named[:MAX_RANKS]
    rows = [[name, *map(_number, (*sizes, sum(sizes)))] for name, sizes in [*shown, ("unsharded", found.wholes)]]
    lines = table([["bytes", *found.roles, "together"], *rows])
    if len(shown) < len(named):
        most = max(map(sum, found.by_rank.values()))
        text = f"and {len(named) - len(shown):,} more ranks; the fullest of all ranks has {most:,}"
        lines.insert(-1, line((text, DIM)))
    return lines


def _under_way(found: MemoryTable) -> list[Text]:
    """Say for how many micro-batches a pipeline's activations are counted."""
    least, most = found.under_way
    if most <= 1:
        return []
    count = f"{most:g}" if least == most else f"{least:g} to {most:g}"
    text = f"activations are counted for {count} micro-batches, those that wait for their backward at once"
    return [line((text, DIM))]


def _by_tensor(found: MemoryTable, *, all_names: bool) -> list[Text]:
    shown = found.uses if all_names else found.uses[:MAX_NAMES]
    rows = [[printable(use.name), use.role, _range(use.bytes.values()), _number(use.whole)] for use in shown]
    lines = table([["tensor", "role", "per rank", "unsharded"], *rows], left=2)
    if len(shown) < len(found.uses):
        lines.append(line((f"and {len(found.uses) - len(shown):,} more tensors: --all", DIM)))
    return lines


def _number(count: int) -> str:
    return f"{count:,}"


def _range(sizes: Iterable[int]) -> str:
    known = sorted(sizes)
    return _number(known[0]) if known[0] == known[-1] else f"{known[0]:,} to {known[-1]:,}"


def _formulas(found: MemoryTable, num_ranks: int) -> list[Text]:
    """Return the memory that DDP and ZeRO would take, and that of the fullest rank without its activations."""
    heads = [
        f"P = {found.params:,} bytes, N = {counted(num_ranks, 'rank')}, Adam",
        "param + grad + optim",
        "bytes per rank",
    ]
    return table([heads, *([one.name, one.formula, _number(one.bytes)] for one in found.schemes)], left=2)


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
