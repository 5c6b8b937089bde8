"""Plain tensors that are whole on every rank: copies, some of them zero, reordered or without ids.

A plain tensor claims nothing, but one that has its whole shape on all ranks is one of copies, and those that hold its
ids in order are right. Copies whose own values are equal on all ranks are right however they were made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.explain import explain
from shardviz.check.report import NotChecked
from shardviz.explain.content import BufferMadeAgain, RankDependentOrder
from shardviz.layout.layout import Layout
from shardviz.layout.region import Region
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.order.case import Case
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Coord

MAX_LISTED = 8


def check_plain_copies(case: Case) -> Iterator[Finding | NotChecked]:
    """Yield the copies of a plain tensor that are not as the others, if these are whole and in order."""
    odd = _odd(case)
    if not odd:
        return
    zero = all(coord in case.ids and not case.ids[coord].any() for coord in odd)
    without = all(coord in case.ids and bool(np.all(case.ids[coord] == -1)) for coord in odd)
    if _are_equal(case):
        if zero or without:
            why = f"{_ranks(case, odd)} made it again after the model was filled, with values equal to the others'"
            yield NotChecked(case.name, why, "order")
    elif zero and case.tensor.role == "buffer":
        yield _zeros(case, odd)
    elif all(_has_all(case, coord) for coord in odd):
        yield _reordered(case, odd)


def _odd(case: Case) -> list[Coord]:
    """Return the coordinates whose copies are not in order, if others' are; empty for what is not one of copies."""
    whole = Region.whole(case.shape)
    shapes = {shard.body.local_shape for shard in case.shards.values()}
    if case.claimed is not None or case.absent or shapes != {case.shape} or 0 in case.shape:
        return []
    odd = [coord for coord in case.shards if case.regions.get(coord) != whole]
    return odd if len(odd) < len(case.shards) else []


def _has_all(case: Case, coord: Coord) -> bool:
    """Whether a copy has every id once, in whatever order."""
    if coord in case.regions:
        return case.numel == len(np.unique(case.local_ids(coord)))
    return np.array_equal(np.sort(case.ids[coord].ravel()), np.arange(1, case.numel + 1))


def _are_equal(case: Case) -> bool:
    """Whether the model's own values are the same on all ranks, as far as the dump has digests of them."""
    initial = case.dump.find("initial", case.tensor.role, case.name)
    if initial is None or set(initial.shards) != {shard.rank for shard in case.shards.values()}:
        return False
    index = initial.index(case.name)
    digests = {shard.digest(index) if shard.digests else "" for shard in initial.shards.values()}
    return len(digests) == 1 and "" not in digests


def _zeros(case: Case, odd: list[Coord]) -> Finding:
    source = min(case.rank(coord) for coord in case.shards if coord not in odd)
    return BufferMadeAgain(source).finding(
        case.name,
        tuple(sorted(map(case.rank, odd))),
        f"{_ranks(case, odd)} hold{'s' if len(odd) == 1 else ''} only zeros; the other "
        f"{len(case.shards) - len(odd):,} of {len(case.shards):,} ranks hold all of it",
        held=f"zeros on {_ranks(case, odd)}",
    )


def _reordered(case: Case, odd: list[Coord]) -> Finding:
    copies = replace(case, claimed=Layout(case.mesh, case.shape, ((),) * len(case.shape)))
    fits = explain(copies.only(odd))[0]
    where = _ranks(case, odd)
    ranks = tuple(sorted(map(case.rank, odd)))
    return RankDependentOrder(ranks).finding(
        case.name,
        ranks,
        f"{len(odd):,} of {len(case.shards):,} ranks hold all of it in another order than the others, whose copies are "
        f"in order: on {where} {fits.held}",
        held=f"on {where}: {fits.held}",
    )


def _ranks(case: Case, coords: list[Coord]) -> str:
    return named_ranks([case.rank(coord) for coord in coords], MAX_LISTED)
