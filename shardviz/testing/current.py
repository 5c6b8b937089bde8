"""The mesh of the test that runs on this rank, for assertions that are not given one."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

device_mesh: ContextVar[DeviceMesh | None] = ContextVar("device_mesh", default=None)
"""A context variable: ranks may be threads."""
