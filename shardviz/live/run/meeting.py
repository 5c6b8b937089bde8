"""Ranks agree to capture a model together, or not at all: a capture is full of collectives, and a job must not hang.

They meet at the job's store, not in a collective: a rank that has no such model, or waits in one of the job's own
collectives for a rank that waits here, never comes, and the others go on without a dump.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from shardviz.live.compat import default_store, have_come

ALL, SOME = "all", "some"

_TIMES: Counter[str] = Counter()
"""How often this process came to each point: the job's store keeps what was decided the last time."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What ranks agreed on.

    Attributes:
        is_complete: Whether all ranks came, and each of them knows it.
        missing: The ranks that did not come.
    """

    is_complete: bool
    missing: tuple[int, ...] = ()


def meet(key: str, patience: float) -> Meeting:
    """Wait for every rank to come to the same point.

    Args:
        key: Names the point, the same on every rank.
        patience: Seconds to wait. One who waited in vain decides for all: whoever comes later finds that decision.
    """
    store = PrefixStore(f"shardviz/{key}", default_store())
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    store.set(f"came/{rank}", "1")
    if store.add("arrived", 1) == num_ranks:
        store.compare_set("decision", "", ALL)
    if not have_come(store, ["decision"], patience):
        store.compare_set("decision", "", SOME)
    is_complete = store.get("decision") == ALL.encode()
    missing = [] if is_complete else [rank for rank in range(num_ranks) if not store.check([f"came/{rank}"])]
    return Meeting(is_complete, tuple(missing))


def meet_again(key: str, patience: float) -> Meeting:
    """Wait for every rank to come to a point to which ranks come any number of times, all of them equally often."""
    _TIMES[key] += 1
    return meet(f"{key}/{_TIMES[key]}", patience)
