"""Optimizers' steps: the last chance to capture a model, and the end of a job after `--steps` of them."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import distributed

from shardviz.live.run.meeting import meet
from shardviz.live.run.notes import Note, leave
from shardviz.live.run.observing import quietly

if TYPE_CHECKING:
    from shardviz.live.run.observer import Observer


def watch_steps(seen: Observer) -> None:
    """Look at the steps of every optimizer of this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    known: WeakSet[Any] = WeakSet()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        # The hook stays: torch walks over the hooks while it calls them, and raises if one is removed meanwhile.
        if distributed.is_initialized() and optimizer not in known:
            known.add(optimizer)
            quietly("Optimizer.step", seen.stepping, optimizer)

    register_optimizer_step_pre_hook(before)
    if seen.options.steps:
        _end_after(seen, register_optimizer_step_post_hook)


def _end_after(seen: Observer, register: Any) -> None:
    taken: Counter[int] = Counter()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        taken[id(optimizer)] += 1
        if taken[id(optimizer)] >= seen.options.steps:
            end(seen)

    register(after)


def end(seen: Observer) -> None:
    """End this rank when every other one is there, too, as a script ends that has nothing more to do."""
    rank = -1
    if distributed.is_initialized():
        rank = distributed.get_rank()
        quietly("the last step", meet, "the end", seen.options.patience)
        with suppress(Exception):
            distributed.destroy_process_group()
    leave(seen.options.session, Note("steps", rank, f"ended after {seen.options.steps} steps"))
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.current_thread() is threading.main_thread():
        sys.exit(0)
    os._exit(0)
