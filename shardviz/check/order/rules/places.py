"""`misordered`, `misordered-within-shard`, `missing`, `duplicated`: ids out of place.

Where every id is held as often as it is claimed, the tensor is misordered, within each shard or across them, and the
finding names the layout that ranks hold. Otherwise ids are missing or held too often. While ranks are absent nothing
can be counted, and each of the others is compared with its claim.

Nothing is claimed of a plain tensor, so all there is to go by is which parts the ranks hold: how many parts there would
have to be, along which axes of the mesh they differ, and how they follow each other. One that has its whole shape on
all ranks is one of copies, and those that hold its ids in order are right. Copies whose own values are equal on all
ranks are right however they were made. Parts that overlap are right if ranks need whole blocks: a weight with a scale
for each block of its rows may be cut within a block, and two ranks share a head of k and v if their heads of q use it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import Case, Fit, cases_of
from shardviz.check.order.infer.explain import explain
from shardviz.check.order.infer.layout import same_region
from shardviz.check.order.infer.ranks import explain_ranks
from shardviz.check.order.infer.splits import disorder_between, splitting
from shardviz.check.order.rules.foreign import CountError, Counts, cause_of_zeros, count_ids
from shardviz.check.report import NotChecked
from shardviz.errors import DumpError
from shardviz.explain.placement.content import BufferMadeAgain, RankDependentOrder
from shardviz.explain.placement.order import Disorder, Scrambled, UnreadOrder
from shardviz.explain.placement.splits import (
    AcrossSegments,
    AnotherOrder,
    CutByHand,
    MeshOrder,
    OneFactor,
    RoundRobin,
    SameShard,
    Segments,
    SegmentsUnderFsdp,
)
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Replicate, Shard
from shardviz.layout.region import Region, indices
from shardviz.relate.measures import axis_sets
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.explain.finding import Finding, Kind
    from shardviz.layout.mesh import Coord

    Spans = Mapping[Coord, tuple[int, int]]


def _held_in_words(case: Case) -> str:
    """Say what the first ranks hold, or what every rank does."""
    regions = sorted((shard.rank, case.regions[coord]) for coord, shard in case.shards.items() if coord in case.regions)
    if len({region for _, region in regions}) == 1 < len(regions):
        return f"every rank {regions[0][1]}"
    return listed(f"rank {rank} {region}" for rank, region in regions)


def explain_plain(case: Case, counts: Counts) -> Fit:
    """Return why ids of a plain tensor are not held equally often."""
    held = _held_in_words(case)
    unused = _unused_axes(case) if counts.num_missing else []
    if unused:
        return Fit(SameShard(tuple(unused)), f"all ranks along {' or '.join(unused)} hold the same part", held)
    zeros = sum(int(np.count_nonzero(ids == 0)) for ids in case.ids.values())
    if zeros:
        cause = CutByHand("padding") if any(map(np.any, case.ids.values())) else cause_of_zeros(case)
        return Fit(cause, "", held, details=(f"{zeros:,} zeros stand in for them",))
    again = _fit_of_chunks(case, counts, held) if counts.most > 1 else None
    if again is not None:
        return again
    if counts.num_duplicated:
        return Fit(CutByHand("overlap"), _overlap(case), held)
    return Fit(CutByHand("remainder"), "", held)


def _fit_of_chunks(case: Case, counts: Counts, held: str) -> Fit | None:
    """Return whose parts ranks hold, if these are parts of torch.chunk; None if they are not."""
    for used, dim in product(_cuts(case, counts), range(len(case.shape))):
        placements = [Shard(dim) if axis in used else Replicate() for axis in case.mesh.axes]
        layout = Layout.from_placements(case.mesh, case.shape, placements)
        for fit in explain_ranks(layout, case.regions):
            return Fit(fit.cause, f"of dim {dim} cut over {' and '.join(used)}, {fit.sentence}", held)
    return None


def _cuts(case: Case, counts: Counts) -> list[tuple[str, ...]]:
    """Return the axes over which parts may have been cut: along which they differ.

    Of copies that nothing is missing of, one that is another part makes parts differ along axes that do not cut them;
    over these the fewest ranks may have another's part.
    """
    used = tuple(case.changing_axes)
    if case.ids or counts.num_missing:
        return [] if case.ids else [used]
    count = len(set(case.regions.values()))
    fitting = [axes for axes in axis_sets(used) if case.mesh.size_over(axes) == count]
    return sorted(fitting, key=lambda axes: _num_odd(case, axes))


def _num_odd(case: Case, axes: tuple[str, ...]) -> int:
    """Count the ranks whose part differs from the majority at their positions on some axes."""
    columns = [case.mesh.axis_index(axis) for axis in axes]
    held: dict[tuple[int, ...], Counter[Region]] = {}
    for coord, region in case.regions.items():
        held.setdefault(tuple(coord[column] for column in columns), Counter())[region] += 1
    return sum(parts.total() - max(parts.values()) for parts in held.values())


def _unused_axes(case: Case) -> list[str]:
    """Return the unvarying axes that would make as many parts as there must be.

    Where several axes have the size that is lacking, any of them may have been meant, and all are returned.
    """
    sizes = {region.size for region in case.regions.values()}
    if case.ids or len(sizes) != 1 or 0 in sizes:
        return []
    parts = -(-case.numel // sizes.pop())
    mesh = case.mesh
    used = case.changing_axes
    still = [axis for axis in mesh.long_axes if axis not in used]
    lacking, remainder = divmod(parts, mesh.size_over(used))
    if remainder or lacking < 2:
        return []
    alone = [axis for axis in still if mesh.axis_size(axis) == lacking]
    together = [axes for axes in combinations(still, 2) if mesh.size_over(axes) == lacking]
    return alone or [axis for axes in together[:1] for axis in axes]


def _overlap(case: Case) -> str:
    """Say by which step parts follow each other along a dim; empty without a single step."""
    regions = list(dict.fromkeys(case.regions[coord] for coord in sorted(case.regions)))
    dims = [dim for dim in range(len(case.shape)) if len({region.dims[dim] for region in regions}) > 1]
    if len(dims) != 1 or any(len(region.dims[dims[0]]) != 1 for region in regions):
        return ""
    spans = sorted(region.dims[dims[0]][0] for region in regions)
    length = spans[0][1] - spans[0][0]
    steps = {after - before for (before, _), (after, _) in pairwise(spans)}
    if len(steps) != 1 or not 0 < min(steps) < length:
        return ""
    return f"parts of {length} along dim {dims[0]} begin {min(steps)} apart"


MAX_RANKS = 8


def check_plain_copies(case: Case) -> Iterator[Finding | NotChecked]:
    """Yield a plain tensor's copies that differ from whole copies in order."""
    odd = _odd_coords(case)
    if not odd:
        return
    ranks = tuple(sorted(map(case.rank, odd)))
    who, hold = named_ranks([case.rank(coord) for coord in odd], MAX_RANKS), "holds" if len(odd) == 1 else "hold"
    others = f"the other {len(case.shards) - len(odd):,} of {len(case.shards):,} ranks hold"
    zero = all(coord in case.ids and not case.ids[coord].any() for coord in odd)
    without = all(coord in case.ids and bool(np.all(case.ids[coord] == -1)) for coord in odd)
    if _are_equal(case):
        if zero or without:
            why = f"{who} made it again after the model was filled, with values equal to the others'"
            yield NotChecked(case.name, why, "order")
    elif zero and case.tensor.role == "buffer":
        cause = BufferMadeAgain(min(case.rank(coord) for coord in case.shards if coord not in odd))
        sentence = f"{who} {hold} only zeros; {others} all of it"
        yield case.finding(cause, ranks, sentence, held=f"zeros on {who}")
    elif all(_has_all(case, coord) for coord in odd):
        copies = replace(case, claimed=Layout.replicated(case.mesh, case.shape))
        held = explain(copies.only(odd))[0].held
        sentence = f"{who} {hold} all of it out of order: {held}; {others} it in order"
        yield case.finding(RankDependentOrder(ranks), ranks, sentence, held=f"on {who}: {held}")


def _odd_coords(case: Case) -> list[Coord]:
    """Return the coordinates whose replicas are out of order while others' are in order."""
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
    """Whether digests show that the model's own values are the same on all ranks."""
    initial = case.initial
    if initial is None or set(initial.shards) != {shard.rank for shard in case.shards.values()}:
        return False
    return initial.is_equal_on_ranks(case.name)


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
