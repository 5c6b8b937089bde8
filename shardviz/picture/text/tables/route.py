"""A route from one layout to another as lines: each collective, the layout it gives, the bytes each rank receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.costs.memory import elements_text
from shardviz.layout.notation import write
from shardviz.layout.routes import cheapest, torch_route, total
from shardviz.picture.text.tables.table import table
from shardviz.picture.text.terminal import line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.layout.layout import Layout
    from shardviz.layout.routes import Leg
    from shardviz.picture.text.terminal import Terminal


def route_lines(start: Layout, end: Layout, dtype: str, terminal: Terminal) -> list[Text]:
    """Return the cheapest route, and torch's where it differs.

    Args:
        start: The present layout.
        end: The wanted layout.
        dtype: The dtype, for bytes.
        terminal: Where the lines go.

    Raises:
        LayoutError: There is no route.
    """
    best, taken = cheapest(start, end), torch_route(start, end)
    heading = line((f"{write(start, dtype)} to {write(end, dtype)}", "bold"), f"  on mesh {start.mesh}")
    if not best:
        return [heading, line(""), line("nothing to do: every rank already has its elements")]
    lines = [heading, line(""), line(f"cheapest: {_cost(best, dtype)}"), *_legs(best, dtype), line("")]
    if taken is None:
        return [
            *lines,
            line("torch routes strided shards by a search of its own, which is not reproduced here"),
        ]
    if [(leg.collective, leg.axis, leg.layout) for leg in taken] == [(x.collective, x.axis, x.layout) for x in best]:
        return [*lines, line(f"{terminal.glyphs.good} torch's redistribute takes the same route")]
    verdict = (
        "the same cost" if total(taken) == total(best) else f"{total(taken) / max(total(best), 1):.3g} times as much"
    )
    other = f"{terminal.glyphs.warning} torch's redistribute takes another route: {_cost(taken, dtype)}, {verdict}"
    return [*lines, line(other), *_legs(taken, dtype)]


def _cost(legs: Sequence[Leg], dtype: str) -> str:
    return f"each rank receives up to {elements_text(total(legs), dtype)}"


def _legs(legs: Sequence[Leg], dtype: str) -> list[Text]:
    rows = [["  collective", "over", "gives", "received"]]
    rows += [[f"  {leg.collective}", leg.axis, write(leg.layout), elements_text(leg.received, dtype)] for leg in legs]
    return table(rows, left=3)
