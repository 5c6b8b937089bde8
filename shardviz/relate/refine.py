"""What placements leave: parts of different ranks, something added, slices in another order.

A search refines only the layouts that are most likely, and only while no chain explains all ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.region import indices
from shardviz.relate import factors
from shardviz.relate.contexts import MAX_LINKS, SMALL
from shardviz.relate.orders import orders_along
from shardviz.relate.regions import sources_of
from shardviz.relate.relations import Chain, Offset, Permuted, Reassigned
from shardviz.relate.sums import coefficient_of
from shardviz.relate.tolerance import COARSE
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.relate.contexts import Context
    from shardviz.relate.search import Search

    Values = NDArray[Any]

FEW_PROBES = 5
"""Ranks of which one must be explained before all others are compared with an unlikely layout."""

FEW_RANKS = 64
"""Ranks whose arrays an added term is estimated from."""

FEW_ELEMENTS = 1 << 10
"""Elements of each of them that it is estimated from."""

MAX_LAYOUTS = 6
"""Layouts that are refined if nothing is claimed: the first one that fits the shapes need not be the right one."""


def refine(search: Search, context: Context, layouts: list[Layout], unexplained: list[set[int]]) -> None:
    """Look for parts of other ranks, something added, and slices in another order."""
    if search.claimed is not None:
        reassign(search, context, layouts[0], unexplained[0] - search.filled.keys())
    is_small = context.source.size <= SMALL or not context.stated
    more_indices = range(min(len(unexplained), MAX_LAYOUTS)) if search.claimed is None else ()
    for index in dict.fromkeys(
        [min(range(len(unexplained)), key=lambda index: len(unexplained[index])), 0, *more_indices]
    ):
        if search.best() or unexplained[index] <= search.filled.keys():
            break
        layout = layouts[index]
        odd = unexplained[index] - search.filled.keys()
        reassign(search, context, layout, odd)
        if search.best() is None:
            add(search, context, layout, odd)
        if search.best() is None and is_small and all(link.op == "sum" for link in context.pending):
            permute(search, context, layout)


def reassign(search: Search, context: Context, layout: Layout, odd: Collection[int]) -> None:
    """Look for what odd ranks hold among the parts of all ranks."""
    if odd and (moved := sources_of(context.actual, context.source, layout, odd, search.near)):
        search.place(context, layout, (Reassigned(moved),))


def add(search: Search, context: Context, layout: Layout, odd: Collection[int]) -> None:
    """Place the source plus a number: the one that fits all odd ranks together, or most."""
    regions = dict(layout.regions())
    fitting = [rank for rank in sorted(odd) if context.actual[rank].shape == regions[rank].shape]
    sides: list[tuple[Values, ...]] = []
    for rank in fitting[:: 1 + len(fitting) // FEW_RANKS]:
        pair = (context.actual[rank], part_of(context.source, regions[rank]))
        held, expected = (side.ravel()[:: 1 + side.size // FEW_ELEMENTS] for side in pair)
        sides.append((held, expected, np.ones(held.shape)))
    for number in _numbers(sides) if sides else ():
        summed = replace(context, links=(*context.links, Offset(number)), source=context.source + number)
        unexplained = search.place(summed, layout, probes=FEW_PROBES) - search.filled.keys()
        if not unexplained:
            return
        if len(unexplained) < len(odd):
            reassign(search, summed, layout, unexplained)


def _numbers(sides: list[tuple[Values, ...]]) -> Iterator[float]:
    """Yield candidates for an added number: that of all ranks together, then the commonest."""
    alone = [times for side in sides if (times := coefficient_of(*([values] for values in side))) is not None]
    together = coefficient_of(*map(list, zip(*sides, strict=True)))
    common = [] if together is None else [together]
    if alone and len(sides) > 2:
        common += [sorted(alone)[len(alone) // 2]]
    likely = [times for times in common if any(_look_alike(held, due + times) for held, due, _ in sides)]
    yield from dict.fromkeys(number for times in likely for number in factors.ratios(times))


def _look_alike(actual: Values, expected: Values) -> bool:
    return next(factors.candidates(actual, expected), None) is not None


def permute(search: Search, context: Context, layout: Layout) -> None:
    """Put the parts of all ranks together, and look for the slices of the source in them."""
    whole, is_known, regions = np.zeros(search.shape), np.zeros(search.shape, np.bool_), dict(layout.regions())
    for rank, actual in context.actual.items():
        if actual.shape == regions[rank].shape and actual.size and rank not in search.filled:
            place = np.ix_(*map(indices, regions[rank].dims))
            whole[place], is_known[place] = np.nan_to_num(actual), True
    tried = set[Chain]()
    source = np.nan_to_num(context.source)
    source_middle, middle = (float(side[is_known].mean()) if is_known.any() else 0.0 for side in (source, whole))
    if abs(middle - source_middle) > COARSE * _root_mean_square(source):  # a number may have been added
        source, whole = source - source_middle, whole - middle
    held_size, size = (_root_mean_square(side[is_known]) or 1.0 for side in (whole, source))
    nears = (search.near, COARSE)[: 1 + bool(search.limit)]
    for scale in (size, held_size, -held_size):
        sides = source / size, whole / scale, is_known, regions
        per_dim = [
            [Permuted(dim, order) for order in orders_along(*sides, dim, nears)] for dim in range(len(search.shape))
        ]
        first_orders = tuple(orders[0] for orders in per_dim if orders)
        for links in (*((link,) for orders in per_dim for link in orders), first_orders):
            if 0 < len(links) < MAX_LINKS and links not in tried:
                tried.add(links)
                if _place_permuted(search, context, layout, links):
                    return


def _place_permuted(search: Search, context: Context, layout: Layout, links: tuple[Permuted, ...]) -> bool:
    """Permute the source's slices, place it, and return whether that explains all ranks."""
    source = context.source
    for link in links:
        source = source.take(link.order, link.dim)
    ordered = replace(context, links=(*context.links, *links), source=source)
    unexplained = search.place(ordered, layout)
    odd = unexplained - search.filled.keys()
    reassign(search, ordered, layout, odd)
    if search.best() is None:
        add(search, ordered, layout, odd)
    return not unexplained


def _root_mean_square(values: Values) -> float:
    return math.sqrt(float(np.square(values).mean())) if values.size else 0.0
