"""Tables of costs: memory next to formulas, a step's collectives, a route between layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.costs import elements_text, groups_text, memory_table, received_by_axes, traffic, why_no_traffic
from shardviz.layout.notation import write
from shardviz.layout.routes import cheapest, torch_route, total
from shardviz.picture.text.terminal import DIM, line, table
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.text import Text

    from shardviz.dump.costs import MemoryTable, Traffic
    from shardviz.dump.dump import Dump
    from shardviz.layout.layout import Layout
    from shardviz.layout.routes import Leg
    from shardviz.picture.text.terminal import Terminal


MAX_RANKS = 16
MAX_NAMES = 40
HEADS = ("  collective", "module", "pass", "count", "bytes", "received", "group", "on ranks")


def memory_lines(dump: Dump, *, all_ranks: bool = False) -> list[Text]:
    """Return the tables of the memory that a run's tensors take.

    Args:
        all_ranks: Whether every rank and every tensor has a line, however many there are.
    """
    memory = memory_table(dump)
    if not memory.uses:
        return [line("the dump has no tensors that take memory")]
    return [
        *_by_rank(memory, all_ranks=all_ranks),
        *_under_way(memory),
        line(""),
        *_by_tensor(memory, all_names=all_ranks),
        line(""),
        *_formulas(memory, dump.files.run.num_ranks),
    ]


def _by_rank(memory: MemoryTable, *, all_ranks: bool) -> list[Text]:
    named = [(f"rank {rank}", sizes) for rank, sizes in memory.by_rank.items()]
    shown = named if all_ranks else named[:MAX_RANKS]
    rows = [[name, *map(_number, (*sizes, sum(sizes)))] for name, sizes in [*shown, ("unsharded", memory.wholes)]]
    lines = table([["bytes", *memory.roles, "together"], *rows])
    if len(shown) < len(named):
        most = max(map(sum, memory.by_rank.values()))
        text = f"and {len(named) - len(shown):,} more ranks; the fullest of all ranks has {most:,}"
        lines.insert(-1, line((text, DIM)))
    return lines


def _under_way(memory: MemoryTable) -> list[Text]:
    """Say for how many micro-batches a pipeline's activations are counted."""
    least, most = memory.under_way
    if most <= 1:
        return []
    count = f"{most:g}" if least == most else f"{least:g} to {most:g}"
    text = f"activations are counted for {count} micro-batches, the most that wait for their backward at once"
    return [line((text, DIM))]


def _by_tensor(memory: MemoryTable, *, all_names: bool) -> list[Text]:
    shown = memory.uses if all_names else memory.uses[:MAX_NAMES]
    rows = [[printable(use.name), use.role, _range(use.bytes.values()), _number(use.whole)] for use in shown]
    lines = table([["tensor", "role", "per rank", "unsharded"], *rows], left=2)
    if len(shown) < len(memory.uses):
        lines.append(line((f"and {len(memory.uses) - len(shown):,} more tensors: --all", DIM)))
    return lines


def _number(count: int) -> str:
    return f"{count:,}"


def _range(sizes: Iterable[int]) -> str:
    known = sorted(sizes)
    return _number(known[0]) if known[0] == known[-1] else f"{known[0]:,} to {known[-1]:,}"


def _formulas(memory: MemoryTable, num_ranks: int) -> list[Text]:
    """Tabulate the memory of DDP and ZeRO, and that of the fullest rank without activations."""
    heads = [
        f"P = {memory.params:,} bytes, N = {counted(num_ranks, 'rank')}, Adam",
        "param + grad + optim",
        "bytes per rank",
    ]
    return table([heads, *([one.name, one.formula, _number(one.bytes)] for one in memory.schemes)], left=2)


def comms_lines(dump: Dump) -> list[Text]:
    """Return the table of a step's collectives, axis by axis."""
    collectives = traffic(dump)
    if not collectives:
        return [line(why_no_traffic(dump))]
    lines: list[Text] = []
    for axes, most in received_by_axes(dump).items():
        heading = f"{groups_text(axes)}: each rank receives up to {most:,} bytes"
        rows = [_collective_cells(one) for one in collectives if one.record.axes == axes]
        lines += [*([line("")] if lines else []), line((heading, "bold")), *table([HEADS, *rows], left=3)]
    return lines


def _collective_cells(collective: Traffic) -> list[str]:
    record = collective.record
    numbers = (record.count, record.bytes, collective.received)
    name, module = f"  {printable(record.op)}", printable(record.module) or "-"
    return [
        name,
        module,
        record.when,
        *(f"{number:,}" for number in numbers),
        str(record.size),
        str(len(collective.ranks)),
    ]


def route_lines(start: Layout, end: Layout, dtype: str, terminal: Terminal) -> list[Text]:
    """Return the cheapest route, and torch's if it differs.

    Args:
        start: The present layout.
        end: The wanted layout.
        dtype: The dtype, for bytes.

    Raises:
        LayoutError: There is no route.
    """
    best, taken = cheapest(start, end), torch_route(start, end)
    heading = line((f"{write(start, dtype)} to {write(end, dtype)}", "bold"), f"  on mesh {start.mesh}")
    if not best:
        return [heading, line(""), line("nothing to do: every rank already has its elements")]
    lines = [heading, line(""), line(f"cheapest: {_cost(best, dtype)}"), *_legs(best, dtype), line("")]
    if taken is None:
        return [*lines, line("torch routes strided shards by a search of its own, which is not reproduced here")]
    if [(leg.collective, leg.axis, leg.layout) for leg in taken] == [(x.collective, x.axis, x.layout) for x in best]:
        return [*lines, line(f"{terminal.glyphs.good} torch's redistribute takes the same route")]
    verdict = (
        "the same cost" if total(taken) == total(best) else f"{total(taken) / max(total(best), 1):.3g} times as much"
    )
    other = f"{terminal.glyphs.warning} torch's redistribute takes a different route: {_cost(taken, dtype)}, {verdict}"
    return [*lines, line(other), *_legs(taken, dtype)]


def _cost(legs: Sequence[Leg], dtype: str) -> str:
    return f"each rank receives up to {elements_text(total(legs), dtype)}"


def _legs(legs: Sequence[Leg], dtype: str) -> list[Text]:
    rows = [["  collective", "over", "gives", "received"]]
    rows += [[f"  {leg.collective}", leg.axis, write(leg.layout), elements_text(leg.received, dtype)] for leg in legs]
    return table(rows, left=3)
