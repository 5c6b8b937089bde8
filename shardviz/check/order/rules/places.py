"""`misordered`, `misordered-within-shard`, `missing`, `duplicated`: ids out of place.

Where every id is held as often as it is claimed, the tensor is misordered, within each shard or across them, and the
finding names the layout that ranks hold. Otherwise ids are missing or held too often. While ranks are absent nothing
can be counted, and each of the others is compared with its claim.

Plain tensors overlap if ranks need whole blocks. A weight with a scale for each block of its rows may be cut within a
block. Both ranks then need that block's scale. In the same way two ranks share a head of k and v if their heads of q
use it. Such parts overlap and are right.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import cases_of
from shardviz.check.order.infer.explain import explain
from shardviz.check.order.infer.layout import same_region
from shardviz.check.order.infer.splits import disorder_between, splitting
from shardviz.check.order.rules.counts import CountError, count_ids
from shardviz.check.order.rules.plain import explain_plain
from shardviz.errors import DumpError
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
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.check.order.case import Case, Fit
    from shardviz.explain.finding import Finding, Kind
    from shardviz.explain.placement.order import Disorder
    from shardviz.layout.mesh import Coord
    from shardviz.layout.region import Region

    Spans = Mapping[Coord, tuple[int, int]]


def are_shared_blocks(case: Case) -> bool:
    """Whether each rank holds just the blocks that cover its part of a finer tensor.

    The finer tensor is in the same module or in one beside it, as `up.weight` is of `up.scale`.
    """
    dims = [dim for dim in range(len(case.shape)) if len({region.dims[dim] for region in case.regions.values()}) > 1]
    if case.claimed is not None or case.ids or case.absent or len(dims) != 1:
        return False
    spans = _spans(case.regions, dims[0])
    return any(
        _are_covered(spans, case.shape[dims[0]], finer, length) for finer, length in _finer_tensors(case, dims[0])
    )


def _finer_tensors(case: Case, dim: int) -> Iterator[tuple[Spans, int]]:
    """Yield ranks' spans of longer dims of tensors nearby, with the lengths of these dims."""
    names = (name for name in case.dump.stamped if name != case.name and _are_near(name, case.name))
    for name in names:
        shape = case.dump.stamps[name].shape
        longer = [long_dim for long_dim, size in enumerate(shape) if size > case.shape[dim]]
        for near in _cases(case, name) if longer else ():
            if near.regions.keys() == case.regions.keys():
                yield from ((_spans(near.regions, long_dim), shape[long_dim]) for long_dim in longer)


def _cases(case: Case, name: str) -> list[Case]:
    """Return how a tensor is laid out on a case's mesh; empty if that is not known."""
    try:
        cases = list(cases_of(case.dump, case.dump.stamped[name], name))
    except DumpError:
        return []
    return [near for near in cases if near.mesh == case.mesh and near.shape == case.dump.stamps[name].shape]


def _are_near(name: str, other: str) -> bool:
    """Whether two tensors are in one module, or in modules next to each other."""
    mine, theirs = (full.split(".")[:-1] for full in (name, other))
    return len(mine) == len(theirs) and mine[:-1] == theirs[:-1]


def _spans(regions: Mapping[Coord, Region], dim: int) -> Spans:
    """Return what ranks hold along a dim, leaving out ranks with no range or several."""
    return {coord: region.dims[dim][0] for coord, region in regions.items() if len(region.dims[dim]) == 1}


def _are_covered(spans: Spans, length: int, finer: Spans, finer_length: int) -> bool:
    """Whether each rank's span is the whole blocks that its span of the finer dim lies in."""
    if not spans or spans.keys() != finer.keys():
        return False
    block = math.gcd(length, *(end for span in spans.values() for end in span))
    size = finer_length * block  # so that a place of the finer dim is in block number place * length // size
    covers = {
        coord: (start * length // size * block, -(-stop * length // size) * block)
        for coord, (start, stop) in finer.items()
    }
    return covers == dict(spans)


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
    elif case.claimed is not None:
        yield _misplaced_finding(case)


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
