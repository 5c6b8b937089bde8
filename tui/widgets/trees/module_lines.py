"""The calls of a step's modules, as they ran."""

from __future__ import annotations

from ..lines import Lines


class ModuleLines(Lines):
    """The list of the calls, with a cursor on one."""

    HELP = """\
## The step by module

The calls of the step's modules in the order in which they ran, each beside the unsharded model's. Before the name stand
four signs: what went in, what came out, and the gradients of what came out and of what went in.

- `✓` every rank has its part of the unsharded model's, `+` the terms of a sum, `~` its slices in another order.
- `✗` something else, `≠` slices several times, `|` cut from the graph, `0` a gradient that did not come.
- **enter** opens a call and closes it; the first wrong one is open from the start, with its numbers beside it.
- **m** goes back to the collectives.
"""
