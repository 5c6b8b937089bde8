"""Some slices of a dim are in order and the others are not: what happened to those alone.

The experts of a stack, or the heads of a weight, may have been loaded in two ways; one of them reorders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.fit import Fit
from shardviz.check.order.infer.orders import name_order
from shardviz.check.order.infer.transpositions import transpositions
from shardviz.explain.order import Slices
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case

    Ids = NDArray[np.int64]
    Index = tuple[Ids, ...]

MAX_LISTED = 6


def explain_slices(case: Case) -> Iterator[Fit]:
    """Yield what happened to the slices of a dim that are out of order, if other slices are in order."""
    shape = case.shape
    if len(shape) < 2 or any(np.any(ids <= 0) for ids in case.ids.values()):
        return
    wanted = np.concatenate([case.claimed_ids(coord).ravel() for coord in case.shards]) - 1
    present = np.concatenate([case.local_ids(coord).ravel() for coord in case.shards]) - 1
    places, held = np.unravel_index(wanted, shape), np.unravel_index(present, shape)
    for dim, size in enumerate(shape):
        wrong = np.unique(places[dim][wanted != present])
        if not np.array_equal(places[dim], held[dim]) or not 0 < len(wrong) < size:
            continue
        inside = np.isin(places[dim], wrong)
        named = _named(shape, dim, tuple(one[inside] for one in places), tuple(one[inside] for one in held))
        if named is not None:
            words, undo = named
            text = f"in slices {listed(wrong.tolist(), MAX_LISTED)} of dim {dim}, {len(wrong)} of {size}, {words}"
            yield Fit(Slices(undo), f"{text}; the others are in order", text)
            return


def _named(shape: tuple[int, ...], dim: int, places: Index, held: Index) -> tuple[str, str] | None:
    """Return what every slice went through and what undoes it for one; None if nothing known fits all of them."""
    inner = tuple(size for other, size in enumerate(shape) if other != dim)
    rest = tuple(other for other in range(len(shape)) if other != dim)
    wanted, own = (np.ravel_multi_index([at[other] for other in rest], inner) for at in (places, held))
    for one, other, text, content in transpositions(inner):
        if np.array_equal(content(wanted), own):
            return f"each slice is transposed: its own {text}", f"slice.transpose({one}, {other})"
    for number, other in enumerate(rest):
        order = _order(places, held, other, shape[other])
        if order is not None:
            cause, words = name_order(order, number)
            return f"each slice's {words}", cause.fix
    return None


def _order(places: Index, held: Index, dim: int, size: int) -> Ids | None:
    """Return the order of a dim's indices, if it is all that differs, the same everywhere and known of all places."""
    if any(not np.array_equal(places[other], held[other]) for other in range(len(places)) if other != dim):
        return None
    order = np.full(size, -1, np.int64)
    order[places[dim]] = held[dim]
    is_order = np.array_equal(order[places[dim]], held[dim]) and np.array_equal(np.sort(order), np.arange(size))
    return order if is_order else None
