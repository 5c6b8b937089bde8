"""`write-not-applied`: an in-place fill that was lost: the tensor does not read back as it was written.

torch loses in-place writes through some views and subclasses, silently: a loader that copies into one leaves the tensor
as it was. Stamping reads every fill back, so the loss shows before anything is sharded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.explain.values import LostWrite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding


def check_writes(dump: Dump) -> Iterator[Finding]:
    """Yield every tensor that did not read back as it was filled."""
    said: dict[tuple[str, str], list[int]] = {}
    for rank, record in sorted(dump.files.ranks.items()):
        for name, reason in record.not_applied:
            said.setdefault((name, reason), []).append(rank)
    for (name, reason), ranks in said.items():
        yield LostWrite().finding(name, tuple(ranks), f"an in-place fill did not take: {reason}")
