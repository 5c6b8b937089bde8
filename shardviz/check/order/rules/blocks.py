"""Plain tensors that overlap because ranks need whole blocks: block scales, heads of k, v.

A weight with a scale for each block of its rows may be cut within a block. Both ranks then need that block's scale. In
the same way two ranks share a head of k and v if their heads of q use it. Such parts overlap and are right.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.check.order.case import cases_of
from shardviz.errors import DumpError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.check.order.case import Case
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
