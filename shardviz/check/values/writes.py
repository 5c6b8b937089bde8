"""Writes that are missing: an in-place fill that was lost, and memory that nobody wrote to before the first call.

torch loses in-place writes through some views and subclasses, silently: a loader that copies into one leaves the tensor
as it was. Stamping reads every fill back, so the loss shows before anything is sharded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.explain.content import NeverInitialized
from shardviz.explain.values import LostWrite
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding


def check_writes(dump: Dump) -> Iterator[Finding]:
    """Yield every tensor that did not read back as it was filled."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, record in sorted(dump.files.ranks.items()):
        for name, reason in record.not_applied:
            ranks_of.setdefault((name, reason), []).append(rank)
    for (name, reason), ranks in ranks_of.items():
        yield LostWrite().finding(name, tuple(ranks), f"an in-place fill did not take: {reason}")


def check_unwritten(dump: Dump) -> Iterator[Finding]:
    """Yield a finding for each parameter that some ranks never wrote to."""
    ranks_of: dict[str, list[int]] = {}
    for rank, record in sorted(dump.files.ranks.items()):
        for name in record.unwritten:
            ranks_of.setdefault(name, []).append(rank)
    for name in filter(dump.first_captured.__contains__, ranks_of):
        claimed, ranks = dump.first_captured[name].claimed, ranks_of[name]
        yield NeverInitialized().finding(
            name,
            tuple(ranks),
            "nothing was written to it between to_empty and the model's first call: its values are what was in the "
            "memory before",
            claimed=write(claimed) if claimed else "",
            held="memory that was never written",
        )
