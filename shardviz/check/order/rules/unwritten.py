"""`foreign`: parameters that nothing was written to between `to_empty` and the model's first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.explain.content import NeverInitialized
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding


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
