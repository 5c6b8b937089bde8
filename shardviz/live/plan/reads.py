"""What the user's own code reads of what torchrun sets: what it does with it, only other ranks can show."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from shardviz.live.compat import replaced
from shardviz.live.plan.forks import is_own
from shardviz.live.world.torchrun import variables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

VARIABLES = frozenset(variables(0, 1, 1))
"""The names of what torchrun sets."""

LOOKUPS = ("os", "collections.abc")
"""Modules through which `os.environ.get(...)` and `os.getenv(...)` come."""


@contextlib.contextmanager
def variables_read(names: frozenset[str] = VARIABLES) -> Iterator[list[str]]:
    """Note which variables the user's own code reads from the environment."""
    found: list[str] = []
    kind: Any = type(os.environ)
    before = kind.__getitem__

    def getitem(environ: Any, name: Any) -> Any:
        if name in names and is_own(_asking(sys._getframe(1)).f_code.co_filename):
            found.append(name)
        return before(environ, name)

    with replaced(kind, "__getitem__", getitem):
        yield found


def _asking(frame: FrameType) -> FrameType:
    """Return the frame that has asked for a variable."""
    while frame.f_back is not None and frame.f_globals.get("__name__") in LOOKUPS:
        frame = frame.f_back
    return frame
