"""Random states of a job that is watched: whatever shardviz draws, the job draws what it would have drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def kept_random_states() -> AbstractContextManager[None]:
    """Restore torch's random states afterwards: the CPU's, and this rank's own device's if it has used one.

    torch's `fork_rng` by itself takes every GPU of the machine, seven of them other ranks', and warns about it.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng([torch.cuda.current_device()] if is_used else [])
