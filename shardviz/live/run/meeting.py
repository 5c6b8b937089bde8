"""Ranks capture a model together, or not at all, and end together: a job must not hang.

They meet at the job's store, not in a collective: a rank that has no such model, or waits in one of the job's own
collectives for a rank that waits here, never comes, and the others go on without a dump. An optimizer's step is the
last chance to capture a model, and the end of a job after `--steps` of them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from shardviz.live.compat.worlds import default_store, have_come, leave_world
from shardviz.live.run.hooks.observing import is_inside, quietly
from shardviz.text import counted

if TYPE_CHECKING:
    from shardviz.live.run.observer import Observer
    from shardviz.live.run.session import Session


ALL, SOME = "all", "some"

_TIMES: Counter[str] = Counter()
"""How often this process came to each point: the job's store keeps what was decided the last time."""


def meet(key: str, patience: float) -> list[int] | None:
    """Wait for every rank to come to the same point.

    Args:
        key: Names the point, the same on every rank.
        patience: Seconds to wait. One who waited in vain decides for all: whoever comes later finds that decision.

    Returns:
        The ranks that did not come; none if all came too late. None if all came, and each of them knows it.
    """
    store = PrefixStore(f"shardviz/{key}", default_store())
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    store.set(f"came/{rank}", "1")
    if store.add("arrived", 1) == num_ranks:
        store.compare_set("decision", "", ALL)
    if not have_come(store, ["decision"], patience):
        store.compare_set("decision", "", SOME)
    if store.get("decision") == ALL.encode():
        return None
    return [rank for rank in range(num_ranks) if not store.check([f"came/{rank}"])]


def meet_again(key: str, patience: float) -> list[int] | None:
    """Wait for every rank at a point that all ranks reach equally often."""
    _TIMES[key] += 1
    return meet(f"{key}/{_TIMES[key]}", patience)


SHORT = 5.0
"""Seconds that a rank whose save is refused waits for the others to end with it."""


def watch_steps(observer: Observer) -> None:
    """Look at the steps of every optimizer of this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    watched: WeakSet[Any] = WeakSet()
    taken: Counter[int] = Counter()
    process = os.getpid()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        # The hook stays: torch walks over the hooks while it calls them, and raises if one is removed meanwhile.
        # torch's state dicts of an optimizer step it once, with nothing to do, before a checkpoint is read into them.
        if distributed.is_initialized() and optimizer not in watched and os.getpid() == process and not is_inside():
            watched.add(optimizer)
            quietly("Optimizer.step", observer.stepping, optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        taken[id(optimizer)] += not is_inside()
        if taken[id(optimizer)] >= observer.session.options.steps:
            end(observer.session)

    register_optimizer_step_pre_hook(before)
    if observer.session.options.steps:
        register_optimizer_step_post_hook(after)


def end(session: Session) -> None:
    """End this rank once all others are ready to end, as if the script were done."""
    rank = -1
    if distributed.is_initialized():
        rank = distributed.get_rank()
        quietly("the last step", meet, "the end", session.options.patience)
        with suppress(Exception):
            leave_world()
    session.leave("ended", f"after {counted(session.options.steps, 'step')}", rank)
    if threading.current_thread() is threading.main_thread():
        sys.exit(0)
    _exit(0)


def refuse_save(session: Session, what: str) -> NoReturn:
    """End this rank of a job with stamped weights, skipping the end of its script.

    Args:
        what: The save that it was about to make, for the command.
    """
    rank, code = -1, 0
    with suppress(Exception):  # the others are gone already, and with them the store
        if distributed.is_initialized():
            rank = distributed.get_rank()
            code = 0 if meet("the end", min(session.options.patience, SHORT)) is None else 1
    session.leave("refused", what, rank)
    _exit(code)


def _exit(code: int) -> NoReturn:
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
