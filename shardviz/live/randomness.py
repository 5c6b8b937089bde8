"""Random states: kept where shardviz draws, and compared where a model may have drawn."""

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


def random_states() -> list[torch.Tensor]:
    """Copy the states of the generators that modules draw from: the CPU's, and this rank's GPU's if used."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if is_used else [])]
