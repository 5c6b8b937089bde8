"""The test that runs on this rank: its mesh, for assertions that are not given one, and who tells its failures."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

device_mesh: ContextVar[DeviceMesh | None] = ContextVar("device_mesh", default=None)
"""A context variable: ranks may be threads."""
is_told_once: ContextVar[bool] = ContextVar("is_told_once", default=False)
"""Whether pytest tells what all ranks say once. In a job of the user's own, rank 0 tells the whole."""
