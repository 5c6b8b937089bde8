"""The search for the shortest chains that give each rank what it holds.

It begins at the tensors that ranks may hold parts of, and at pending reductions, and has two halves. *Placement* asks
which slices of a source a rank holds; it compares coarsely, at any scale, in any dtype. *Numbers* asks what was done to
the values; it compares precisely, within the bound of the pair. What explains one rank is tried on all of them: tiny
shards survive rounding or exchange by luck, and would split the group.

What placements leave is refined: parts of different ranks, something added, slices in another order. A search refines
only the layouts that are most likely, and only while no chain explains all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.region import indices
from shardviz.relate import factors
from shardviz.relate.casts import rounded
from shardviz.relate.factors import LIKELY, coefficient_of, may_be, reduced
from shardviz.relate.orders import layouts_of, orders_along, sources_of
from shardviz.relate.relations import (
    SURPRISE,
    Chain,
    Filled,
    Group,
    Located,
    Offset,
    Pending,
    Permuted,
    Reassigned,
    Related,
    Rounded,
    Scaled,
    Transposed,
)
from shardviz.relate.tolerance import COARSE, EPSILON, EXACT, SAFETY
from shardviz.relate.values import constant_of, error_of, farthest, part_of, root_mean_square

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.relate.relations import Pair
    from shardviz.relate.tolerance import Bound

    Values = NDArray[Any]
    Numbers = tuple[Scaled | Rounded, ...]


MAX_LINKS = 3
"""A chain of more relations explains anything."""

SMALL = 1 << 14
"""Up to so many elements all chains with equally few links are searched for: the least surprising one is meant."""

MAX_TURNED = 4
"""Dims of a tensor whose dims are tried in every order."""


@dataclass(frozen=True)
class Context:
    """A source, and the arrays that may come from it.

    Attributes:
        links: How the source comes from the wanted tensor.
        pending: The reductions that make the arrays of what ranks hold.
        source: The source, in the shape in which regions count.
        actual: What each rank holds, reduced.
        sizes: The norms of the terms of sums.
    """

    links: Chain
    pending: tuple[Pending, ...]
    source: Values
    actual: Mapping[int, Values]
    sizes: Mapping[int, float] = field(default_factory=dict)

    def chain(self, placed: Chain, numbers: Chain) -> Chain:
        """Return the whole chain, given where the parts are and what was done to their values."""
        return (*self.links, *placed, *self.pending, *numbers)

    @property
    def stated(self) -> Chain:
        """The relations that the context brings itself."""
        return self.chain((), ())


def num_links(chain: Chain, claimed: Layout | None) -> int:
    """Count the relations of a chain that the claim does not state."""
    pending = {(link.axis, link.op) for link in chain if isinstance(link, Pending)}
    num = len(pending ^ (set(claimed.partial) if claimed else set()))
    for link in chain:
        if isinstance(link, Located):
            num += claimed is not None and not link.layout.same_regions(claimed)
        elif not isinstance(link, Pending):
            num += 1
    return num


def cost(chain: Chain, claimed: Layout | None) -> tuple[int, int, int]:
    """Return what orders chains: fewest links, then least surprising, then fewest splits."""
    splits = sum(len(splits) for link in chain if isinstance(link, Located) for splits in link.layout.chains)
    return num_links(chain, claimed), sum(SURPRISE.index(type(link)) for link in chain), splits


def index_shape_of(pair: Pair) -> tuple[int, ...]:
    """Return the shape that a pair's regions index: the claim's, flattened for a flat view."""
    return pair.wanted.shape if pair.claimed is None else pair.claimed.index_shape


def contexts(pair: Pair, held: Mapping[int, Values]) -> Iterator[Context]:
    """Yield sources and reductions: those of the claim first, then those with the fewest links."""
    axes = pair.mesh.long_axes
    claimed = tuple(Pending(*partial) for partial in pair.claimed.partial) if pair.claimed else ()
    single = ((Pending(axis, op),) for op in LIKELY for axis in axes)
    two = (tuple(map(Pending, neighbors)) for neighbors in pairwise(axes))
    pendings = dict.fromkeys([claimed, (), *single, *two])
    sources = list(_sources(pair))
    ways = [
        (num_links((*source[0], *pending), pair.claimed), source, pending) for source in sources for pending in pendings
    ]
    for links, (chain, source), pending in sorted(ways, key=lambda way: way[0]):
        if links <= MAX_LINKS:
            actual, sizes = reduced(held, pair.mesh, pending, pair.bound.limit) if pending else (held, {})
            if actual:
                yield Context(chain, pending, source, actual, sizes)


def _sources(pair: Pair) -> Iterator[tuple[Chain, Values]]:
    """Yield the wanted tensor in each order of its dims, if they are few, in which it has the shape of the claim."""
    shape = index_shape_of(pair)
    source = np.asarray(pair.wanted, np.float64)
    in_order = tuple(range(source.ndim))
    for dims in permutations(in_order) if source.ndim <= MAX_TURNED else (in_order,):
        turned = source.transpose(dims)
        if turned.shape == shape:
            yield (() if dims == in_order else (Transposed(dims),)), turned


NARROW = ("float32", "float16", "bfloat16")
"""The dtypes that values may have been rounded to."""


FEW_CHAINS = 8
"""Chains of some ranks that are tried on all of them: each rank may have a factor of its own."""


class Search:
    """The search over one pair.

    Args:
        is_refined: Whether what placements leave is looked for: reordered slices, parts of other ranks, added numbers.

    Attributes:
        explained: Each chain that explains some ranks, with these.
    """

    def __init__(self, pair: Pair, *, is_refined: bool = True) -> None:
        self.is_refined = is_refined
        self.pair, self.mesh, self.claimed, self.limit = pair, pair.mesh, pair.claimed, pair.bound.limit
        self.shape = index_shape_of(pair)
        self.actual = {rank: held for rank, held in pair.held.items() if rank in pair.mesh}
        self.narrower = [dtype for dtype in NARROW if EPSILON[dtype] > self.limit]
        self.near = max(SAFETY * self.limit, EXACT)
        numbers = {held.tobytes() for held in self.actual.values()} if pair.wanted.size == 1 else set[bytes]()
        self.are_own_numbers = len(numbers) == pair.mesh.size > 1
        self.explained: dict[Chain, set[int]] = {}
        self.known_layouts: dict[object, list[Layout]] = {}
        constants = {rank: constant_of(held) for rank, held in self.actual.items()}
        self.filled = {rank: value for rank, value in constants.items() if value is not None}
        for rank, value in self.filled.items():
            self.explained.setdefault((Filled(value),), set()).add(rank)

    def cost(self, chain: Chain) -> tuple[int, ...]:
        """Return what orders chains; a scaled sum counts as one link more if each rank has a number of its own.

        Some factor makes any sum of such numbers right.
        """
        kinds = {type(link) for link in chain} if self.are_own_numbers else set()
        links, *others = cost(chain, self.claimed)
        return links + ({Scaled, Pending} <= kinds), *others

    def best(self) -> Chain | None:
        """Return the cheapest chain that explains all ranks."""
        complete = (chain for chain, ranks in self.explained.items() if len(ranks) == len(self.pair.held))
        return min(complete, key=self.cost, default=None)

    def layouts(self, context: Context) -> list[Layout]:
        """Return the layouts that give most ranks their shapes, the claimed one in front."""
        shapes = tuple(context.actual[rank].shape if rank in context.actual else None for rank in self.mesh.ranks)
        if shapes not in self.known_layouts:
            self.known_layouts[shapes] = layouts_of(shapes, self.mesh, self.shape, self.claimed)
        return self.known_layouts[shapes]

    def numbers(self, actual: Values, shard: Values, size: float) -> Iterator[Numbers]:
        """Yield what may have been done to the values of a part, simplest first."""
        yield ()
        if actual.shape != shard.shape:
            return
        for factor in (1.0, *factors.candidates(actual, shard)):
            scaled: Numbers = (Scaled(factor),) if factor != 1 else ()
            error = error_of(actual, shard * factor, size, COARSE)
            if scaled and error > (COARSE if self.limit else EXACT):
                break  # not even nearly the part times a number
            if scaled:
                yield scaled
            yield from ((*scaled, Rounded(dtype)) for dtype in self.narrower if self.limit < error < COARSE)

    def place(self, context: Context, layout: Layout, moved: Chain = (), probes: int = -1) -> set[int]:
        """Compare each rank with its region of the source, and note what explains it.

        What was done on one rank is tried on all of them.

        Args:
            moved: The ranks that hold the region of a different rank.
            probes: Give up if none of so many ranks is explained; -1: never.

        Returns:
            The ranks that no relation explains.
        """
        unexplained: set[int] = set()
        ranks_of: dict[Numbers, set[int]] = {}
        regions = dict(layout.regions())
        source_of = dict(pair for link in moved if isinstance(link, Reassigned) for pair in link.sources)

        def sides(rank: int) -> tuple[Values, Values]:
            part = part_of(context.source, regions[source_of.get(rank, rank)])
            return np.asarray(context.actual[rank], np.float64), part

        for rank in sorted(context.actual, key=lambda rank: (rank in self.filled, rank % 7)):
            actual, shard = sides(rank)
            for links in self.numbers(actual, shard, context.sizes.get(rank, 0.0)) if may_be(actual, shard) else ():
                if self.note(context, layout, moved, links, rank, (actual, shard)):
                    ranks_of.setdefault(links, set()).add(rank)
                    break
            else:
                unexplained.add(rank)
                if len(unexplained) == probes and not ranks_of:
                    return set(context.actual)
        for links, ranks in sorted(ranks_of.items(), key=lambda item: -len(item[1]))[:FEW_CHAINS]:
            for rank in context.actual.keys() - ranks - unexplained:
                self.note(context, layout, moved, links, rank, sides(rank))
        return unexplained

    def note(
        self, context: Context, layout: Layout, moved: Chain, links: Numbers, rank: int, sides: tuple[Values, Values]
    ) -> bool:
        """Keep a chain if it explains a rank, and return whether it does."""
        chain = context.chain((*moved, Located(layout)), links)
        actual, shard = sides
        for link in links:
            shard = shard * link.factor if isinstance(link, Scaled) else rounded(shard, link.dtype)
        scale = math.prod(link.factor for link in links if isinstance(link, Scaled))
        error = error_within(self.pair.bound, actual, shard, (context.sizes.get(rank, 0.0), scale))
        if error <= self.limit and num_links(chain, self.claimed) <= MAX_LINKS:
            self.explained.setdefault(chain, set()).add(rank)
        return error <= self.limit

    def explore(self, context: Context) -> None:
        """Try the placements: as claimed, other layouts, and what they leave."""
        links = num_links(context.stated, self.claimed)
        summed = {link.axis for link in context.pending}
        layouts = [layout for layout in self.layouts(context) if not summed & {*layout.split_axes}]
        is_large = context.source.size > SMALL
        unexplained: list[set[int]] = []
        for layout in layouts[: None if links < MAX_LINKS else 1]:
            unexplained.append(
                self.place(context, layout, probes=FEW_PROBES if unexplained or (links and is_large) else -1)
            )
            if not unexplained[-1] and (is_large or (self.claimed and len(unexplained) == 1)):
                break
        best = self.best()
        if (
            self.is_refined
            and unexplained
            and links < MAX_LINKS
            and (best is None or not (is_large or num_links(best, self.claimed) <= links))
        ):
            refine(self, context, layouts, unexplained)

    def related(self) -> Related:
        """Split the ranks into few groups, each with its cheapest chain."""
        unexplained, groups = set(self.pair.held), list[Group]()
        while unexplained:
            chain = min(
                self.explained,
                key=lambda chain: (-len(unexplained & self.explained[chain]), self.cost(chain)),
                default=None,
            )
            ranks = unexplained & self.explained[chain] if chain is not None else set()
            if chain is None or not ranks:
                return Related((*groups, Group(tuple(sorted(unexplained)), None)))
            groups.append(Group(tuple(sorted(ranks)), chain))
            unexplained -= ranks
        return Related(tuple(groups))


def error_within(bound: Bound, actual: Values, expected: Values, sizes: tuple[float, float]) -> float:
    """Return the relative error, or a bound of elements' largest error in units of its limit.

    Beyond the limit it may be that of the whole, which is less than that of its worst slice.

    Args:
        sizes: The norm of the terms of a sum, and the factor that is found, which multiplies the rounding as well.
    """
    if not bound.element:
        return error_of(actual, expected, sizes[0], bound.limit)
    return bound.limit * farthest(actual, expected) / (bound.element * max(1.0, abs(sizes[1])))


def relation_of(pair: Pair, *, is_refined: bool = True) -> Related:
    """Relate each rank's array to the expected one.

    Args:
        is_refined: Whether what placements leave is looked for, which takes ten times as long: slices in another order,
            parts of other ranks, added numbers.

    Returns:
        One group with one chain if there is a chain that explains all ranks, else groups of ranks. A rank that nothing
        explains is in a group without a chain.

    Example:
        >>> from shardviz.layout.layout import Layout
        >>> from shardviz.layout.mesh import parse_mesh
        >>> from shardviz.relate.relations import Pair
        >>> wanted, mesh = np.arange(1.0, 13.0).reshape(4, 3), parse_mesh("tp=2")
        >>> pair = Pair(wanted, {0: wanted[:2] / 2, 1: wanted[2:] / 2}, Layout(mesh, (4, 3), (("tp",), ())), mesh)
        >>> relation_of(pair).chain[1:]
        (Scaled(factor=0.5),)
    """
    search = Search(pair, is_refined=is_refined)
    with np.errstate(over="ignore", invalid="ignore"):  # infinity, and squares of numbers near the largest
        for context in contexts(pair, search.actual):
            best, links = search.best(), num_links(context.stated, pair.claimed)
            is_enough = pair.wanted.size > SMALL or not links
            if best is not None and num_links(best, pair.claimed) <= links - (0 if is_enough else 1):
                break
            search.explore(context)
        return search.related()


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
    if abs(middle - source_middle) > COARSE * root_mean_square(source):  # a number may have been added
        source, whole = source - source_middle, whole - middle
    held_size, size = (root_mean_square(side[is_known]) or 1.0 for side in (whole, source))
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
