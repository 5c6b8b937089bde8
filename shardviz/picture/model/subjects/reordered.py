"""Elements that are on the right rank in the wrong order: a map shows who holds each element, and not where."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.rules.reassembly import gathered_ids
from shardviz.layout.region import indices

if TYPE_CHECKING:
    from shardviz.check.order.case import Case
    from shardviz.layout.region import Ranges, Region


MOST_ELEMENTS = 1 << 24
"""Elements of a tensor up to which what a collective gave is looked at again."""


def count_reordered(case: Case) -> int:
    """Count the elements that the rank that claims them has at another place of its shard, copies once.

    Where a collective put the tensor together, only as many as that has out of place beside those on other ranks.
    0 where a rank's claim and what it holds are not of one shape, or not products of index ranges.
    """
    if case.claimed is None:
        return 0
    parts: dict[Region, Region] = {}
    for coord in case.shards:
        held = case.regions.get(coord)
        claimed = case.claimed.region(coord)
        if held is None or held.shape != claimed.shape or parts.setdefault(claimed, held) != held:
            return 0
    counts = [_counted(claimed, held) for claimed, held in parts.items() if claimed != held]
    found, gathered = sum(within for _, within in counts), _out_of_place(case)
    return found if gathered is None else max(min(found, gathered - sum(elsewhere for elsewhere, _ in counts)), 0)


def _out_of_place(case: Case) -> int | None:
    """Return how many elements a collective put out of place; None where none put this tensor together."""
    stamp = case.dump.stamps.get(case.name)
    if stamp is None or math.prod(stamp.shape) > MOST_ELEMENTS:
        return None
    for record in case.dump.files.ranks.values():
        for one in record.gathered:
            ids = gathered_ids(case.dump, stamp, one) if one.name == case.name and not one.error else None
            if ids is not None and len(ids) == math.prod(stamp.shape):
                return int((ids != np.arange(1, len(ids) + 1)).sum())
    return None


def _counted(claimed: Region, held: Region) -> tuple[int, int]:
    """Return how many elements of a held part are not in the claimed one, and how many are at another place of it."""
    counts = [_shared(ours, theirs) for ours, theirs in zip(claimed.dims, held.dims, strict=True)]
    both = math.prod(both for both, _ in counts)
    return held.size - both, both - math.prod(alike for _, alike in counts)


@lru_cache(maxsize=1 << 12)
def _shared(claimed: Ranges, held: Ranges) -> tuple[int, int]:
    """Return how many indices are in both, and how many at the same place of both."""
    ours, theirs = indices(claimed), indices(held)
    return len(np.intersect1d(ours, theirs)), int((ours == theirs).sum())
