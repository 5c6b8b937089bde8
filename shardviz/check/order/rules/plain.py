"""Plain tensors: ranks' parts in words, and why ids are missing, repeated or out of order.

Nothing is claimed of a plain tensor, so all there is to go by is which parts the ranks hold: how many parts there would
have to be, along which axes of the mesh they differ, and how they follow each other. One that has its whole shape on
all ranks is one of copies, and those that hold its ids in order are right. Copies whose own values are equal on all
ranks are right however they were made.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import Fit
from shardviz.check.order.infer.explain import explain
from shardviz.check.order.infer.ranks import explain_ranks
from shardviz.check.order.rules.foreign import cause_of_zeros
from shardviz.check.report import NotChecked
from shardviz.explain.placement.content import BufferMadeAgain, RankDependentOrder
from shardviz.explain.placement.splits import CutByHand, SameShard
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Replicate, Shard
from shardviz.layout.region import Region
from shardviz.relate.measures import axis_sets
from shardviz.text import listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.order.case import Case
    from shardviz.check.order.rules.counts import Counts
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Coord

MAX_LISTED = 3


def _held_in_words(case: Case) -> str:
    """Say what the first ranks hold, or what every rank does."""
    regions = sorted((shard.rank, case.regions[coord]) for coord, shard in case.shards.items() if coord in case.regions)
    if len({region for _, region in regions}) == 1 < len(regions):
        return f"every rank {regions[0][1]}"
    return listed((f"rank {rank} {region}" for rank, region in regions), MAX_LISTED)


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
    fitting = [axes for axes in axis_sets(used) if math.prod(map(case.mesh.axis_size, axes)) == count]
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
    still = [axis for axis in mesh.axes if axis not in used and mesh.axis_size(axis) > 1]
    lacking, remainder = divmod(parts, math.prod(mesh.axis_size(axis) for axis in used))
    if remainder or lacking < 2:
        return []
    alone = [axis for axis in still if mesh.axis_size(axis) == lacking]
    together = [axes for axes in combinations(still, 2) if math.prod(map(mesh.axis_size, axes)) == lacking]
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
        copies = replace(case, claimed=Layout(case.mesh, case.shape, ((),) * len(case.shape)))
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
    initial = case.dump.find("initial", case.tensor.role, case.name)
    if initial is None or set(initial.shards) != {shard.rank for shard in case.shards.values()}:
        return False
    index = initial.index(case.name)
    digests = {shard.digest(index) if shard.digests else "" for shard in initial.shards.values()}
    return len(digests) == 1 and "" not in digests
