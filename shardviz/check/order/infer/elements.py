"""The tensor was moved element by element: transposed before or after the split, or pushed along by padding."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.fit import Fit
from shardviz.check.order.infer.slices import explain_slices
from shardviz.check.order.infer.transpositions import transpositions
from shardviz.explain.order import Padded, Transposed, TransposedShards, WithoutStrides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case
    from shardviz.layout.mesh import Coord

    Ids = NDArray[np.int64]

SAMPLE = 64


def explain_elements(case: Case) -> Iterator[Fit]:
    """Yield transpositions and paddings that give every rank the ids it holds."""
    is_moved = False
    for fit in _moved(case):
        is_moved = True
        yield fit
    if not is_moved:
        yield from _without_strides(case)


def _moved(case: Case) -> Iterator[Fit]:
    claimed = case.claimed
    assert claimed is not None
    sizes = [(math.prod(shard.body.local_shape), claimed.region(coord).size) for coord, shard in case.shards.items()]
    if all(own == wanted for own, wanted in sizes):
        yield from _transposed(case)
        yield from _padded(case)
        yield from explain_slices(case)
    yield from _transposed_shards(case)


def _transposed(case: Case) -> Iterator[Fit]:
    for first, second, text, content in transpositions(case.shape):
        if _everywhere(case, content):
            words = f"the tensor's own {text}"
            yield Fit(Transposed(first, second), f"the shards are those of {words}", words)
            return


def _everywhere(case: Case, content: Callable[[Ids], Ids]) -> bool:
    """Whether every rank holds `content` of the places it claims; a sample of each rank is looked at first."""
    for limit in (SAMPLE, None):
        for coord in case.shards:
            wanted = case.claimed_ids(coord).ravel()[:limit] - 1
            if not np.array_equal(content(wanted) + 1, case.local_ids(coord).ravel()[:limit]):
                return False
    return True


def _padded(case: Case) -> Iterator[Fit]:
    """Zeros in front push the content along one dim; what does not fit any more is lost."""
    first = next((coord for coord in case.ids if np.any(case.ids[coord] > 0)), None)
    if first is None:
        return
    own, wanted = case.ids[first], case.claimed_ids(first).reshape(case.ids[first].shape)
    at = int(np.flatnonzero(own > 0)[0])
    moved = int(wanted.flat[at] - own.flat[at])
    for dim in range(len(case.shape)):
        stride = math.prod(case.shape[dim + 1 :])
        if moved > 0 and moved % stride == 0 and moved // stride < case.shape[dim]:
            by = moved // stride
            if all(_is_shifted(case, coord, dim, by) for coord in case.shards):
                words = f"dim {dim} moved up by {by}, with {by} zeros before it"
                yield Fit(Padded(), f"padding comes first: {words}", words)
                return


def _is_shifted(case: Case, coord: Coord, dim: int, by: int) -> bool:
    stride = math.prod(case.shape[dim + 1 :])
    wanted = case.claimed_ids(coord).ravel()
    padding = (wanted - 1) // stride % case.shape[dim] < by
    return np.array_equal(case.local_ids(coord).ravel(), np.where(padding, 0, wanted - by * stride))


def _transposed_shards(case: Case) -> Iterator[Fit]:
    assert case.claimed is not None
    if case.claimed.flat is not None or len(case.shape) < 2:
        return
    for coord, shard in case.shards.items():
        if tuple(reversed(shard.body.local_shape)) != case.claimed.region(coord).shape:
            return
        if not np.array_equal(case.local_ids(coord).T, case.claimed_ids(coord)):
            return
    words = "each shard transposed"
    yield Fit(TransposedShards(), f"the ranks hold {words}", words)


def _without_strides(case: Case) -> Iterator[Fit]:
    """Yield a transposition of every shard whose elements were read in the order of its memory."""
    assert case.claimed is not None
    if case.claimed.flat is not None or len(case.shape) < 2:
        return
    parts = [(case.local_ids(coord), case.claimed_ids(coord)) for coord in case.shards]
    if any(own.shape != wanted.shape for own, wanted in parts):
        return
    for one, other in combinations(range(len(case.shape)), 2):
        if all(np.array_equal(own.ravel(), wanted.swapaxes(one, other).ravel()) for own, wanted in parts):
            words = f"each shard's own transpose({one}, {other}), in the order of its memory"
            yield Fit(WithoutStrides(), f"the ranks hold {words}", words)
            return
