"""Tensors moved element by element: transposed around the split, or shifted by padding.

If only some slices of a dim are out of order, they are looked at alone: the experts of a stack, or the heads of a
weight, may have been loaded in two ways, one of which reorders.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.fit import Fit
from shardviz.check.order.infer.orders import name_order, transpositions
from shardviz.explain.placement.order import Padded, Slices, Transposed, TransposedShards, WithoutStrides
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case
    from shardviz.layout.mesh import Coord

    Ids = NDArray[np.int64]
    Index = tuple[Ids, ...]

SAMPLE = 64


def explain_elements(case: Case) -> Iterator[Fit]:
    """Yield transpositions and paddings that give every rank the ids it holds."""
    is_moved = False
    for fit in _element_moves(case):
        is_moved = True
        yield fit
    if not is_moved:
        yield from _without_strides(case)


def _element_moves(case: Case) -> Iterator[Fit]:
    claimed = case.claimed
    assert claimed is not None
    sizes = [(math.prod(shard.body.local_shape), claimed.region(coord).size) for coord, shard in case.shards.items()]
    if all(size == claimed_size for size, claimed_size in sizes):
        yield from _transposed(case)
        yield from _padding_shift(case)
        yield from explain_slices(case)
    if all(np.array_equal(case.local_ids(coord).T, case.claimed_ids(coord)) for coord in case.shards):
        words = "each shard transposed"
        yield Fit(TransposedShards(), f"the ranks hold {words}", words)


def _transposed(case: Case) -> Iterator[Fit]:
    for first, second, text, content in transpositions(case.shape):
        if _is_held_by_all(case, content):
            words = f"the tensor's own {text}"
            yield Fit(Transposed(first, second), f"the shards are those of {words}", words)
            return


def _is_held_by_all(case: Case, content: Callable[[Ids], Ids]) -> bool:
    """Whether every rank holds `content` of its claimed places; a sample is compared first."""
    for limit in (SAMPLE, None):
        for coord in case.shards:
            claimed = case.claimed_ids(coord).ravel()[:limit] - 1
            if not np.array_equal(content(claimed) + 1, case.local_ids(coord).ravel()[:limit]):
                return False
    return True


def _padding_shift(case: Case) -> Iterator[Fit]:
    """Zeros in front push the content along one dim; what does not fit any more is lost."""
    first = next((coord for coord in case.ids if np.any(case.ids[coord] > 0)), None)
    if first is None:
        return
    held, claimed = case.ids[first], case.claimed_ids(first).reshape(case.ids[first].shape)
    at = int(np.flatnonzero(held > 0)[0])
    moved = int(claimed.flat[at] - held.flat[at])
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
    claimed = case.claimed_ids(coord).ravel()
    padding = (claimed - 1) // stride % case.shape[dim] < by
    return np.array_equal(case.local_ids(coord).ravel(), np.where(padding, 0, claimed - by * stride))


def _without_strides(case: Case) -> Iterator[Fit]:
    """Yield a transposition of every shard whose elements were read in the order of its memory."""
    parts = [(case.local_ids(coord), case.claimed_ids(coord)) for coord in case.shards]
    if any(held_ids.shape != claimed_ids.shape for held_ids, claimed_ids in parts):
        return
    for first, second in combinations(range(len(case.shape)), 2):
        if all(
            np.array_equal(held_ids.ravel(), claimed_ids.swapaxes(first, second).ravel())
            for held_ids, claimed_ids in parts
        ):
            words = f"each shard's own transpose({first}, {second}), in the order of its memory"
            yield Fit(WithoutStrides(), f"the ranks hold {words}", words)
            return


MAX_LISTED = 6


def explain_slices(case: Case) -> Iterator[Fit]:
    """Explain slices of a dim that are out of order while other slices are in order."""
    shape = case.shape
    if len(shape) < 2 or any(np.any(ids <= 0) for ids in case.ids.values()):
        return
    claimed = np.concatenate([case.claimed_ids(coord).ravel() for coord in case.shards]) - 1
    present = np.concatenate([case.local_ids(coord).ravel() for coord in case.shards]) - 1
    places, held = np.unravel_index(claimed, shape), np.unravel_index(present, shape)
    for dim, size in enumerate(shape):
        wrong = np.unique(places[dim][claimed != present])
        if not np.array_equal(places[dim], held[dim]) or not 0 < len(wrong) < size:
            continue
        inside = np.isin(places[dim], wrong)
        named = _name_slices(shape, dim, tuple(at[inside] for at in places), tuple(at[inside] for at in held))
        if named is not None:
            words, undo = named
            text = f"in slices {listed(wrong.tolist(), MAX_LISTED)} of dim {dim}, {len(wrong)} of {size}, {words}"
            yield Fit(Slices(undo), f"{text}; the others are in order", text)
            return


def _name_slices(shape: tuple[int, ...], dim: int, places: Index, held: Index) -> tuple[str, str] | None:
    """Return the disorder of all slices, and how to undo it for one; None if no rule fits all."""
    inner = tuple(size for axis, size in enumerate(shape) if axis != dim)
    other_dims = tuple(axis for axis in range(len(shape)) if axis != dim)
    from_numbers, to_numbers = (np.ravel_multi_index([at[axis] for axis in other_dims], inner) for at in (places, held))
    for first, second, text, content in transpositions(inner):
        if np.array_equal(content(from_numbers), to_numbers):
            return f"each slice is transposed: its own {text}", f"slice.transpose({first}, {second})"
    for number, dim_number in enumerate(other_dims):
        order = _order(places, held, dim_number, shape[dim_number])
        if order is not None:
            cause, words = name_order(order, number)
            return f"each slice's {words}", cause.fix
    return None


def _order(places: Index, held: Index, dim: int, size: int) -> Ids | None:
    """Return the order of a dim's indices if it is complete and nothing else differs."""
    if any(not np.array_equal(places[axis], held[axis]) for axis in range(len(places)) if axis != dim):
        return None
    order = np.full(size, -1, np.int64)
    order[places[dim]] = held[dim]
    is_order = np.array_equal(order[places[dim]], held[dim]) and np.array_equal(np.sort(order), np.arange(size))
    return order if is_order else None
