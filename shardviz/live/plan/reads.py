"""What the user's own code reads of its place among the ranks: what it does with that, only other ranks show."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from shardviz.live.compat import replaced
from shardviz.live.plan.forks import is_own, own_line
from shardviz.live.world.torchrun import variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from shardviz.layout.mesh import Mesh

VARIABLES = frozenset(variables(0, 1, 1))
"""The names of what torchrun sets."""

OF_RANK = frozenset(("RANK", "LOCAL_RANK", "GROUP_RANK"))
"""Those of them that are not the same on all ranks."""

LOOKUPS = ("os", "collections.abc")
"""Modules through which `os.environ.get(...)` and `os.getenv(...)` come."""


NOT_ALL = (
    "the code reads its place along {}{}: {} of these {:,} places were asked, and one in the middle that does "
    "something else is planned as if it did not"
)


class Reading:
    """What the user's own code reads of its place, and which places were asked.

    Args:
        mesh: The mesh.
        reads: The axes along which it reads where it is, and the lines that do.
        asked: The ranks that were asked.

    Attributes:
        axes: The axes.
        known: Positions along them at which a rank was asked.
        missing: How many positions there are beside those.
    """

    def __init__(self, mesh: Mesh, reads: Mapping[str, str], asked: Iterable[int]) -> None:
        self._mesh = mesh
        self._reads = reads
        self.axes = tuple(axis for axis in mesh.axes if axis in reads)
        self.known = {self.position(rank) for rank in asked}
        self.missing = math.prod(map(mesh.axis_size, self.axes)) - len(self.known)

    def position(self, rank: int) -> tuple[int, ...]:
        """Return where a rank is along the axes."""
        coord = self._mesh.coord_of(rank)
        return tuple(coord[self._mesh.axis_index(axis)] for axis in self.axes)

    @property
    def said(self) -> tuple[str, ...]:
        """That some were not asked, where that is so."""
        if not self.missing:
            return ()
        known, line = len(self.known), self._reads[self.axes[0]]
        return (NOT_ALL.format(", ".join(self.axes), line, known, known + self.missing),)


@contextlib.contextmanager
def variables_read() -> Iterator[dict[str, str]]:
    """Note which variables of torchrun the user's own code reads from the environment, and the line that did."""
    found: dict[str, str] = {}
    kind: Any = type(os.environ)
    before = kind.__getitem__

    def getitem(environ: Any, name: Any) -> Any:
        if name in VARIABLES and is_own(_asking(sys._getframe(1)).f_code.co_filename):
            found.setdefault(name, own_line())
        return before(environ, name)

    with replaced(kind, "__getitem__", getitem):
        yield found


@contextlib.contextmanager
def places_read(mesh: Mesh) -> Iterator[dict[str, str]]:
    """Note along which axes the user's own code reads where this rank is, and the line that did.

    Its number in a group is its place along those axes along which the group's ranks are not the same.
    """
    found: dict[str, str] = {}

    def note(ranks: Sequence[int]) -> None:
        if len(found) < mesh.ndim:
            found.update({axis: own_line() for axis in mesh.axes_within(ranks) if axis not in found})

    with variables_read() as read, _groups_asked(note), _meshes_asked(note):
        yield found
    for name in OF_RANK & read.keys():
        for axis in mesh.axes:
            found.setdefault(axis, read[name])


@contextlib.contextmanager
def _groups_asked(note: Callable[[Sequence[int]], None]) -> Iterator[None]:
    """Note it where own code calls `distributed.get_rank()`, under whatever name, or `group.rank()`."""
    before = distributed.ProcessGroup.rank

    def rank(group: Any) -> int:
        frame: FrameType | None = sys._getframe(1)
        of = group
        if frame is not None and frame.f_code is distributed.get_rank.__code__:
            of = frame.f_locals["group"] or group
            frame = frame.f_back
        if frame is not None and is_own(frame.f_code.co_filename):
            note(distributed.get_process_group_ranks(of))
        return before(group)

    with replaced(distributed.ProcessGroup, "rank", rank):
        yield


@contextlib.contextmanager
def _meshes_asked(note: Callable[[Sequence[int]], None]) -> Iterator[None]:
    """Note it where own code asks a mesh for the place of this rank: outside of that mesh it is none, also a place."""
    world = distributed.group.WORLD

    def asks(name: str, groups_of: Callable[..., list[Any]]) -> Any:
        before = getattr(DeviceMesh, name)

        def method(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
            returned = before(mesh, *args, **kwargs)
            if is_own(sys._getframe(1).f_code.co_filename):
                for group in [world] if returned is None else groups_of(mesh, *args, **kwargs):
                    note(distributed.get_process_group_ranks(group))
            return returned

        return replaced(DeviceMesh, name, method)

    with (
        asks("get_rank", lambda _: [world]),
        asks("get_local_rank", lambda mesh, *args, **kwargs: [mesh.get_group(*args, **kwargs)]),
        asks("get_coordinate", lambda mesh: [mesh.get_group(dim) for dim in range(mesh.ndim)]),
    ):
        yield


def _asking(frame: FrameType) -> FrameType:
    """Return the frame that has asked for a variable."""
    while frame.f_back is not None and frame.f_globals.get("__name__") in LOOKUPS:
        frame = frame.f_back
    return frame
