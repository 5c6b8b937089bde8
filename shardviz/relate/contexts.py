"""Where a search begins: the tensors that ranks may hold parts of, and pending reductions."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.relations import SURPRISE, Chain, Located, Pending, Transposed
from shardviz.relate.sums import LIKELY, reduced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.relate.pair import Pair

    Values = NDArray[Any]

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
    """Yield sources and reductions: those of the claim first, then those with the fewest links.

    Args:
        pair: The pair.
        held: What each rank of the mesh holds.
    """
    axes = [axis for axis, size in zip(pair.mesh.axes, pair.mesh.shape, strict=True) if size > 1]
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
    """Yield the wanted tensor in each order of its dims in which it has the shape of the claim."""
    shape = index_shape_of(pair)
    source = np.asarray(pair.wanted, np.float64)
    for dims in permutations(range(source.ndim)) if source.ndim <= MAX_TURNED else ():
        turned = source.transpose(dims)
        if turned.shape == shape:
            yield (() if list(dims) == sorted(dims) else (Transposed(dims),)), turned
