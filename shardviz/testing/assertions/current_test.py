"""The test that runs on this rank: its mesh, and how its failures are reported."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

device_mesh: ContextVar[DeviceMesh | None] = ContextVar("device_mesh", default=None)
is_reported_once: ContextVar[bool] = ContextVar("is_reported_once", default=False)
"""Whether pytest reports the failure of all ranks once. In a user's own job, rank 0 has the full report."""
