"""Reads of the rank's coordinates by the user's own code."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from shardviz.live.compat import replaced
from shardviz.live.plan.forks import is_own, own_line
from shardviz.live.world.torchrun import variables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from shardviz.layout.mesh import Mesh

VARIABLES = frozenset(variables(0, 1, 1))
"""The names of what torchrun sets."""

OF_RANK = frozenset(("RANK", "LOCAL_RANK", "GROUP_RANK"))
"""Those of them that are not the same on all ranks."""

LOOKUPS = ("os", "collections.abc")
"""Modules through which `os.environ.get(...)` and `os.getenv(...)` come."""

QUERIES = {query.__code__ for query in (distributed.get_rank, DeviceMesh.get_rank, DeviceMesh.get_local_rank)}
"""Functions of torch that ask a group for this rank's place in it."""


@contextlib.contextmanager
def variables_read() -> Iterator[dict[str, str]]:
    """Note which of torchrun's variables user code reads, and the line that reads each."""
    lines: dict[str, str] = {}
    kind: Any = type(os.environ)
    before = kind.__getitem__

    def getitem(environ: Any, name: Any) -> Any:
        if name in VARIABLES:
            frame: FrameType = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in LOOKUPS:
                frame = frame.f_back
            if is_own(frame.f_code.co_filename):
                lines.setdefault(name, own_line())
        return before(environ, name)

    with replaced(kind, "__getitem__", getitem):
        yield lines


@contextlib.contextmanager
def places_read(mesh: Mesh) -> Iterator[dict[str, str]]:
    """Note along which axes the user's own code reads where this rank is, and the line that did.

    Its number in a group is its place along those axes along which the group's ranks differ. Outside of a mesh it has
    no place there, which is a place in the world.
    """
    lines: dict[str, str] = {}
    rank, get_coordinate = distributed.ProcessGroup.rank, DeviceMesh.get_coordinate

    def note(group: Any) -> None:
        if len(lines) < mesh.ndim:
            for axis in mesh.axes_within(distributed.get_process_group_ranks(group)):
                lines.setdefault(axis, own_line())

    def noted_rank(group: Any) -> int:
        frame, read_group = sys._getframe(1), group
        while frame.f_code in QUERIES and frame.f_back is not None:
            read_group = frame.f_locals.get("group") or read_group
            frame = frame.f_back
        if is_own(frame.f_code.co_filename):
            note(read_group)
        return rank(group)

    def noted_coordinate(device_mesh: DeviceMesh) -> Any:
        coordinate = get_coordinate(device_mesh)
        if is_own(sys._getframe(1).f_code.co_filename):
            inside = coordinate is not None
            for group in device_mesh.get_all_groups() if inside else [distributed.group.WORLD]:
                note(group)
        return coordinate

    with (
        variables_read() as read,
        replaced(distributed.ProcessGroup, "rank", noted_rank),
        replaced(DeviceMesh, "get_coordinate", noted_coordinate),
    ):
        yield lines
    for name in sorted(OF_RANK & read.keys()):
        for axis in mesh.axes:
            lines.setdefault(axis, read[name])
