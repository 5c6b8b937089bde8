"""`misordered`, `misordered-within-shard`, `missing`, `duplicated`: ids out of place.

Where every id is held as often as it is claimed, the tensor is misordered, within each shard or across them, and the
finding names the layout that ranks hold. Otherwise ids are missing or held too often. While ranks are absent nothing
can be counted, and each of the others is compared with its claim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.explain import explain
from shardviz.check.order.infer.layout import same_region
from shardviz.check.order.infer.splits import disorder_between, splitting
from shardviz.check.order.rules.blocks import are_shared_blocks
from shardviz.check.order.rules.counts import CountError, Counts, count_ids
from shardviz.check.order.rules.plain import explain_plain
from shardviz.explain.placement.order import Scrambled, UnreadOrder
from shardviz.explain.placement.splits import (
    AcrossSegments,
    AnotherOrder,
    MeshOrder,
    OneFactor,
    RoundRobin,
    Segments,
    SegmentsUnderFsdp,
)
from shardviz.layout.region import indices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.order.case import Case
    from shardviz.check.order.infer.fit import Fit
    from shardviz.explain.finding import Finding, Kind
    from shardviz.explain.placement.order import Disorder
    from shardviz.layout.mesh import Coord

OF_ORDER = (AnotherOrder, MeshOrder, Segments, SegmentsUnderFsdp, AcrossSegments, RoundRobin, OneFactor)
"""Differences between layouts that are in the order of the elements, whatever the shards' sizes are."""


def check_places(case: Case) -> Iterator[Finding]:
    """Yield what is wrong with where a case's own ids are.

    Raises:
        CountError: The ids are too many to be counted.
    """
    if case.as_claimed:
        return
    if case.claimed is not None and (case.held is not None or case.absent):
        yield _misplaced_finding(case)
        return
    counts = count_ids(case)
    if counts.least and not counts.even and are_shared_blocks(case):
        return
    if counts.num_missing and case.dump.files.missing_ranks:
        raise CountError(f"{counts.num_missing:,} elements are on no rank that is there; others may hold them")
    if case.claimed is None and not counts.even and case.dump.files.missing_ranks:
        raise CountError("ranks without a file may hold the copies that some of its parts lack")
    if not counts.even:
        yield from _uneven_finding(case, counts)
    elif case.claimed is not None:
        yield _misplaced_finding(case)


def _uneven_finding(case: Case, counts: Counts) -> Iterator[Finding]:
    fits = explain(case) if case.claimed is not None else [explain_plain(case, counts)]
    is_told = bool(counts.least and counts.num_duplicated)  # what others have too often, these have less often
    if counts.num_missing and not is_told:
        where = case.index(counts.first_missing)
        copies = "copies" if counts.copies > 1 else "copy"
        how = "are on no rank" if counts.least == 0 else f"have fewer than {counts.copies:,} {copies}"
        ranks = tuple(map(case.rank, case.shards))
        text = f"{counts.num_missing:,} of {case.numel:,} elements {how}, the first at {where}"
        yield _finding(case, "missing", ranks, text, fits)
    if counts.num_duplicated:
        where = case.index(counts.first_duplicated)
        ranks = tuple(case.rank(coord) for coord in case.shards if _holds(case, coord, counts.first_duplicated))
        often = f"up to {counts.most:,} copies instead of {counts.copies:,}"
        often += f" and {counts.num_missing:,} have fewer" if is_told and counts.num_missing else ""
        text = f"{counts.num_duplicated:,} of {case.numel:,} elements have {often}, the first at {where}"
        yield _finding(case, "duplicated", ranks, text, fits)


def _holds(case: Case, coord: Coord, element: int) -> bool:
    if coord in case.ids:
        return bool(np.any(case.ids[coord] == element + 1))
    region = case.regions[coord]
    return bool(region.size) and all(
        any(start <= at < stop for start, stop in ranges)
        for at, ranges in zip(case.index(element), region.dims, strict=True)
    )


def _cause(case: Case, fits: list[Fit]) -> Disorder:
    """Return the first cause that fits, with the next one if that may as well be it."""
    first, *alternatives = fits
    if case.absent and isinstance(first.cause, Scrambled):
        return UnreadOrder()
    if alternatives and first.layout is None:
        return replace(first.cause, or_if=(alternatives[0].held, alternatives[0].cause))
    return first.cause


def _finding(case: Case, kind: Kind, ranks: Sequence[int], sentence: str, fits: list[Fit]) -> Finding:
    """Return the finding of what fits a case, the likeliest first."""
    first, *alternatives = fits
    return case.finding(
        _cause(case, fits),
        ranks,
        f"{sentence}{first.clause}",
        kind=kind,
        details=first.details,
        held=first.held,
        also=tuple(fit.held for fit in alternatives),
    )


def _misplaced_finding(case: Case) -> Finding:
    kind, wrong = _kind(case), wrong_ranks(case)
    what = "do not hold the elements their placements claim"
    if kind == "misordered-within-shard":
        what = "hold the right elements in the wrong order"
    return _finding(case, kind, wrong, f"{len(wrong):,} of {len(case.shards):,} ranks {what}", explain(case))


def _kind(case: Case) -> Kind:
    assert case.claimed is not None
    if case.held is not None:
        if splitting(case.held) != splitting(case.claimed):
            return "wrong-placement"
        if disorder_between(case.claimed, case.held) in OF_ORDER:
            return "misordered"
    if shape_differs(case):
        return "wrong-shape"
    within = all(_same_set(case, coord) for coord in case.shards)
    return "misordered-within-shard" if within else "misordered"


def shape_differs(case: Case) -> list[Coord]:
    """Return the coordinates whose local shape is not what chunking gives; empty shards match."""
    assert case.claimed is not None
    coords = []
    for coord, shard in case.shards.items():
        region, local_shape = case.claimed.region(coord), shard.body.local_shape
        if local_shape != region.shape and not (region.size == 0 and 0 in local_shape):
            coords.append(coord)
    return coords


def _same_set(case: Case, coord: Coord) -> bool:
    assert case.claimed is not None
    if coord in case.ids:
        return np.array_equal(np.sort(case.ids[coord].ravel()), np.sort(case.claimed_ids(coord).ravel()))
    pairs = zip(case.regions[coord].dims, case.claimed.region(coord).dims, strict=True)
    return all(np.array_equal(np.sort(indices(held)), np.sort(indices(claimed))) for held, claimed in pairs)


def wrong_ranks(case: Case) -> tuple[int, ...]:
    """Return the ranks that do not hold what they claim."""
    assert case.claimed is not None
    claimed = {coord: case.claimed.region(coord) for coord in case.regions}
    right = {coord for coord, region in case.regions.items() if same_region(claimed[coord], region)}
    return tuple(sorted(shard.rank for coord, shard in case.shards.items() if coord not in right))
