"""Megatron's process groups, where a job has set them up."""

from __future__ import annotations

import sys
from typing import Any

from torch import distributed


def is_up() -> bool:
    """Whether `parallel_state` has the groups of a model."""
    state = _state()
    return state is not None and bool(state.model_parallel_is_initialized())


def group(get: str) -> Any:
    """Return the group that a function of `parallel_state` returns."""
    return getattr(_state(), get)()


def ranks_of(get: str) -> tuple[int, ...]:
    """Return the ranks of the group that a function of `parallel_state` returns; this rank alone without one."""
    found = getattr(_state(), get)(check_initialized=False) if get.startswith("get_expert") else group(get)
    return tuple(distributed.get_process_group_ranks(found)) if found is not None else (distributed.get_rank(),)


def _state() -> Any:
    return sys.modules.get("megatron.core.parallel_state")
