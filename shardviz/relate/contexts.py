"""Where a search begins: the tensors that ranks may hold parts of, and the reductions that may still be pending."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.relations import SURPRISE, Chain, Located, Padded, Pending, Transposed
from shardviz.relate.sums import LIKELY, reduced
from shardviz.relate.values import padded_to

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
        behind: What was done to the arrays last, and is undone in `actual`.
    """

    links: Chain
    pending: tuple[Pending, ...]
    source: Values
    actual: Mapping[int, Values]
    sizes: Mapping[int, float] = field(default_factory=dict)
    behind: Chain = ()

    def chain(self, placed: Chain, numbers: Chain) -> Chain:
        """Return the whole chain, given where the parts are and what was done to their values."""
        return (*self.links, *placed, *self.pending, *numbers, *self.behind)

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
    """Return the shape in which the regions of a pair count: that of the claim, flattened for a flat view."""
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
    cuts: list[tuple[Chain, Mapping[int, Values]]] = [((), held), *_without_padding(pair, held)]
    ways = [
        (num_links((*source[0], *pending, *cut[0]), pair.claimed), source, pending, cut)
        for source in sources
        for pending in pendings
        for cut in cuts
    ]
    for links, (chain, source), pending, (behind, parts) in sorted(ways, key=lambda way: way[0]):
        if links <= MAX_LINKS:
            actual, sizes = reduced(parts, pair.mesh, pending, pair.bound.limit) if pending else (parts, {})
            if actual:
                yield Context(chain, pending, source, actual, sizes, behind)


def _without_padding(pair: Pair, held: Mapping[int, Values]) -> Iterator[tuple[Chain, Mapping[int, Values]]]:
    """Yield what ranks hold without zeros behind each part, if all are padded to one size along one dim."""
    if pair.claimed is None or not held:
        return
    shapes = dict(zip(pair.mesh.ranks, pair.claimed.local_shapes().tolist(), strict=True))
    ndims = {values.ndim for values in held.values()} | {len(shape) for shape in shapes.values()}
    for dim in range(min(ndims)) if len(ndims) == 1 else ():
        sizes = {values.shape[dim] for values in held.values()}
        size = sizes.pop()
        if sizes or size <= max(shape[dim] for shape in shapes.values()):
            continue
        turned = {rank: np.moveaxis(values, dim, 0) for rank, values in held.items()}
        if not any(values[shapes[rank][dim] :].any() for rank, values in turned.items()):
            cut = {rank: np.moveaxis(values[: shapes[rank][dim]], 0, dim) for rank, values in turned.items()}
            yield (Padded(dim, size),), cut


def _sources(pair: Pair) -> Iterator[tuple[Chain, Values]]:
    """Yield the wanted tensor in each way in which it has the shape of the claim."""
    shape = index_shape_of(pair)
    source = np.asarray(pair.wanted, np.float64)
    if pair.claimed is not None and pair.claimed.flat is not None and source.size == math.prod(shape):
        source = source.reshape(shape)
    if source.ndim != len(shape):
        return
    for dims in permutations(range(source.ndim)) if source.ndim <= MAX_TURNED else ():
        turned = source.transpose(dims)
        if turned.shape == shape:
            yield (() if list(dims) == sorted(dims) else (Transposed(dims),)), turned
    longer = [dim for dim, size in enumerate(shape) if size > source.shape[dim]]
    source = padded_to(source, shape)
    if longer and source.shape == shape:
        yield tuple(Padded(dim, shape[dim]) for dim in longer), source
