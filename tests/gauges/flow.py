"""Imports against the flow: which room may import which, and circles of modules that import each other.

The flow is layout -> dump -> relate -> explain -> check -> picture -> commands. What is recorded crosses from the live
half to the offline half in a dump alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx

from tests.gauges.tree import imported, room_of, sources

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.gauges.tree import Source

EVERYWHERE = ("errors", "groups", "text", "machine", "versions")
"""Rooms that any other may import, and that import none."""

FILES = ("checkpoint", "reference", "stamping")
"""Values in files, and what is read out of them or written into them: one room in three folders."""

OFFLINE = ("layout", "dump", "relate", "explain", "check", "plan", *FILES)

ARROWS: Mapping[str, tuple[str, ...]] = {
    "layout": (),
    "dump": ("layout",),
    "relate": ("layout",),
    "explain": ("layout", "relate"),
    "check": ("layout", "dump", "relate", "explain"),
    "plan": ("layout", "dump"),
    **dict.fromkeys(FILES, ("layout", "dump", "relate", "explain", "check", *FILES)),
    "picture": OFFLINE,
    "notebook": (*OFFLINE, "picture"),
    "tui": (*OFFLINE, "picture"),
    "live": ("layout", "dump", "relate", "plan", *FILES, "probe_files"),
    "testing": (*OFFLINE, "picture", "live", "probe_files"),
    "commands": (*OFFLINE, "picture", "notebook", "live", "testing", "probe_files", "tui", "cli"),
    "probes": ("shardviz", "layout", "live", "testing"),
    # What stands in no folder.
    "shardviz": ("live",),
    "__main__": ("cli",),
    "cli": ("commands", "live"),
    "probe_files": (),
    **dict.fromkeys(EVERYWHERE, ()),
}
"""For each room, the rooms that it may import besides `EVERYWHERE` and itself. Imports for types alone are free."""


def against_the_flow(files: Sequence[Source]) -> list[tuple[str, str]]:
    """Return each module that imports from a room which its own may not import, with that room."""
    found = {
        (module, room_of(other))
        for module, others in imported(files).items()
        for other in others
        if not is_allowed(room_of(module), room_of(other))
    }
    return sorted(found)


def is_allowed(room: str, other: str) -> bool:
    """Whether a room may import another one. A room that the table does not have may import nothing."""
    return other in (room, *EVERYWHERE, *ARROWS.get(room, ()))


def circles(files: Sequence[Source]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others, in functions too."""
    graph = nx.DiGraph()
    graph.add_edges_from((module, other) for module, others in imported(files).items() for other in others)
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def product() -> list[Source]:
    """Return the files that are installed; those of `tests` are not parsed for them."""
    return [file for file in sources() if file.module.startswith("shardviz")]
