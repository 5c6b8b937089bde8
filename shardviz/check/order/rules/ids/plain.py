"""Plain tensors that were cut by hand: what ranks hold in words, and why ids of them are missing or held too often.

Nothing is claimed of a plain tensor, so all there is to go by is which parts the ranks hold: how many parts there would
have to be, along which axes of the mesh they differ, and how they follow each other.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.fit import Fit
from shardviz.check.order.infer.ranks import explain_ranks
from shardviz.check.order.rules.ids.counts import varies
from shardviz.check.order.rules.ids.zeros import cause_of_zeros
from shardviz.explain.splits import CutByHand, SameShard
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Replicate, Shard
from shardviz.text import listed

if TYPE_CHECKING:
    from shardviz.check.order.case import Case
    from shardviz.check.order.rules.ids.counts import Counts
    from shardviz.layout.region import Region

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
    again = _of_parts_again(case, counts, held) if counts.most > 1 else None
    if again is not None:
        return again
    if counts.num_duplicated:
        return Fit(CutByHand("overlap"), _overlap(case), held)
    return Fit(CutByHand("remainder"), "", held)


def _of_parts_again(case: Case, counts: Counts, held: str) -> Fit | None:
    """Return whose parts ranks hold, if these are parts of torch.chunk; None if they are not."""
    for used, dim in product(_cuts(case, counts), range(len(case.shape))):
        placements = [Shard(dim) if axis in used else Replicate() for axis in case.mesh.axes]
        layout = Layout.from_placements(case.mesh, case.shape, placements)
        for fit in explain_ranks(layout, case.regions):
            return Fit(fit.cause, f"of dim {dim} cut over {' and '.join(used)}, {fit.sentence}", held)
    return None


def _cuts(case: Case, counts: Counts) -> list[tuple[str, ...]]:
    """Return the axes over which parts may have been cut: those along which they differ, all or as many as make them.

    Of copies that nothing is missing of, one that is another part makes parts differ along axes that do not cut them;
    over these the fewest ranks may have another's part.
    """
    mesh = case.mesh
    used = tuple(axis for column, axis in enumerate(mesh.axes) if varies(case, column))
    if case.ids or counts.num_missing:
        return [] if case.ids else [used]
    count = len(set(case.regions.values()))
    some = [axes for many in range(1, len(used) + 1) for axes in combinations(used, many)]
    fitting = [axes for axes in some if math.prod(map(mesh.axis_size, axes)) == count]
    return sorted(fitting, key=lambda axes: _num_odd(case, axes))


def _num_odd(case: Case, axes: tuple[str, ...]) -> int:
    """Return how many ranks have another part than most of those at the same positions along some axes."""
    columns = [case.mesh.axis_index(axis) for axis in axes]
    held: dict[tuple[int, ...], Counter[Region]] = {}
    for coord, region in case.regions.items():
        held.setdefault(tuple(coord[column] for column in columns), Counter())[region] += 1
    return sum(parts.total() - max(parts.values()) for parts in held.values())


def _unused_axes(case: Case) -> list[str]:
    """Return the axes whose coordinates would make as many parts as there must be, and along which nothing varies.

    Where several axes have the size that is lacking, any of them may have been meant, and all are returned.
    """
    sizes = {region.size for region in case.regions.values()}
    if case.ids or len(sizes) != 1 or 0 in sizes:
        return []
    parts = -(-case.numel // sizes.pop())
    mesh = case.mesh
    used = [axis for column, axis in enumerate(mesh.axes) if varies(case, column)]
    still = [axis for axis in mesh.axes if axis not in used and mesh.axis_size(axis) > 1]
    lacking, rest = divmod(parts, math.prod(mesh.axis_size(axis) for axis in used))
    if rest or lacking < 2:
        return []
    alone = [axis for axis in still if mesh.axis_size(axis) == lacking]
    together = [axes for axes in combinations(still, 2) if math.prod(map(mesh.axis_size, axes)) == lacking]
    return alone or [axis for axes in together[:1] for axis in axes]


def _overlap(case: Case) -> str:
    """Say how parts follow each other along the one dim in which they differ; empty if there is no one step."""
    regions = list(dict.fromkeys(case.regions[coord] for coord in sorted(case.regions)))
    dims = [dim for dim in range(len(case.shape)) if len({region.dims[dim] for region in regions}) > 1]
    if len(dims) != 1 or any(len(region.dims[dims[0]]) != 1 for region in regions):
        return ""
    starts, lengths = _starts(regions, dims[0])
    steps = {after - before for before, after in pairwise(starts)}
    if len(steps) != 1 or not 0 < min(steps) < lengths[0]:
        return ""
    return f"parts of {lengths[0]} along dim {dims[0]} begin {min(steps)} apart"


def _starts(regions: list[Region], dim: int) -> tuple[list[int], list[int]]:
    spans = sorted(region.dims[dim][0] for region in regions)
    return [start for start, _ in spans], [stop - start for start, stop in spans]
