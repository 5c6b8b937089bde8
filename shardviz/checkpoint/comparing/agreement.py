"""Whether two tensors, stored or made, have the same values, after a cast too; block by block, so in little memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.beside.job import Live
from shardviz.checkpoint.beside.reading import is_of
from shardviz.checkpoint.comparing.casts import cast, is_narrower
from shardviz.checkpoint.maps.made import Made, pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shardviz.checkpoint.tensor import Tensor

    Turn = Callable[[NDArray[Any]], NDArray[Any]]

BLOCK = 1 << 18
"""Elements that are compared at a time: as many as a processor keeps near."""

TILE = 256
"""Rows and columns that are compared at a time where one side lies across the other."""

SHARED = 1 << 22
"""Elements of a matrix that several threads turn: numpy lets them run side by side."""

WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def narrower(one: str, other: str) -> str:
    """Return the type of two to which the other is rounded."""
    return one if is_narrower(one, other) else other


def can_cast(one: str, other: str) -> bool:
    """Whether it is known how values of one of two types are rounded to the other."""
    narrow = narrower(one, other)
    return all(cast(np.empty(0, f"<u{_width(dtype)}"), dtype, narrow) is not None for dtype in (one, other))


def _width(dtype: str) -> int:
    from shardviz.layout.dtypes import itemsize

    return itemsize(dtype) or 1


def agree(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and the same values, after a cast where their types differ.

    Raises:
        DumpError: One of them cannot be read.
    """
    for live, entry in ((one, other), (other, one)):
        if isinstance(live, Live):
            return is_of(live, entry)
    types = one.dtype, other.dtype
    if one.shape != other.shape or not can_cast(*types):
        return False
    if isinstance(other, Made) and not isinstance(one, Made):
        one, other, types = other, one, types[::-1]
    parts = pieces(one.node, other.bits) if isinstance(one, Made) else [(other.bits, one.bits)]
    turns = None if types[0] == types[1] else (_to(types[1], narrower(*types)), _to(types[0], narrower(*types)))
    return all(equal(view, bits, turns) for view, bits in parts)


def _to(dtype: str, narrow: str) -> Turn:
    def turned(bits: NDArray[Any]) -> NDArray[Any]:
        found = cast(bits, dtype, narrow)
        assert found is not None, "can_cast says so"
        return found

    return turned


def equal(one: NDArray[Any], other: NDArray[Any], turns: tuple[Turn, Turn] | None = None) -> bool:
    """Whether two arrays are equal, block by block: what differs is soon found.

    Args:
        one: An array.
        other: Another one.
        turns: What is done to each of them before.
    """
    if one.shape != other.shape:
        return False
    if one.size <= BLOCK or one.ndim == 0:
        return np.array_equal(*(one, other) if turns is None else (turns[0](one), turns[1](other)))
    if one.ndim == 2 and _is_across(one) != _is_across(other):
        return _equal_in_tiles(one, other, turns)
    rows = BLOCK // max(one.size // len(one), 1)
    if not rows:
        return all(equal(own, their, turns) for own, their in zip(one, other, strict=True))
    starts = range(0, len(one), rows)
    return all(equal(one[at : at + rows], other[at : at + rows], turns) for at in starts)


def _is_across(array: NDArray[Any]) -> bool:
    return abs(array.strides[-1]) > abs(array.strides[-2])


def _equal_in_tiles(one: NDArray[Any], other: NDArray[Any], turns: tuple[Turn, Turn] | None) -> bool:
    """Whether a matrix equals another one transposed: by tiles, so that both sides are read in stretches."""

    def is_equal(top: int) -> bool:
        places = [(slice(top, top + TILE), slice(left, left + TILE)) for left in range(0, one.shape[1], TILE)]
        return all(_equal_tiles(one[place], other[place], turns) for place in places)

    tops = range(0, one.shape[0], TILE)
    if one.size < SHARED:
        return all(map(is_equal, tops))
    pool = ThreadPoolExecutor(WORKERS)
    try:
        return all(pool.map(is_equal, tops))
    finally:
        pool.shutdown(cancel_futures=True)


def _equal_tiles(one: NDArray[Any], other: NDArray[Any], turns: tuple[Turn, Turn] | None) -> bool:
    if turns is not None:
        return equal(one, other, turns)
    return _equal_across(one, other) if _is_across(other) else _equal_across(other, one)


def _equal_across(flat: NDArray[Any], across: NDArray[Any]) -> bool:
    """Whether a tile is one that lies across it: its lines are turned by eight bytes, not element by element."""
    group = 8 // across.itemsize
    rows = len(across) - len(across) % group
    lines = across[:rows].T
    if group < 2 or not rows or lines.strides[-1] != across.itemsize:
        return np.array_equal(flat, across)
    turned = np.ascontiguousarray(lines.view("<u8").T).view(across.dtype)
    by_line = turned.reshape(rows // group, -1, group).swapaxes(1, 2)
    is_equal = bool((flat[:rows].reshape(by_line.shape) == by_line).all())
    return is_equal and np.array_equal(flat[rows:], across[rows:])
