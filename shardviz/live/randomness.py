"""A watched job's random states: shardviz's draws do not change what the job draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def kept_random_states() -> AbstractContextManager[None]:
    """Restore torch's random states afterwards: the CPU's, and this rank's GPU's if used.

    torch's `fork_rng` by itself takes every GPU of the machine, seven of them other ranks', and warns about it.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng([torch.cuda.current_device()] if is_used else [])
