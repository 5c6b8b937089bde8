"""Routes between layouts: the cheapest collectives, and those of torch's `redistribute`.

A layout is a node and a collective over one mesh axis an edge, as long as the bytes that the busiest rank receives.
The cheapest route is a shortest path (networkx). The graph has every layout that splits dims by axes or by the
numbers of either end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from shardviz.errors import LayoutError
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Partial, Placement, Replicate, Shard
from shardviz.layout.splits import axes_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import networkx as nx  # type: ignore[import-untyped]

    from shardviz.layout.splits import Chain

Collective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice"]

MAX_LAYOUTS = 20_000
"""A map of more layouts than this is not searched."""

EACH = 1e-3
"""The cost of a collective beside its elements: among routes with equal bytes, the one with fewer steps is taken."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One collective of a route.

    Attributes:
        collective: What torch calls it; a `slice` is local, nothing is sent.
        layout: What it leads to.
        received: The most elements that any rank takes in. Uneven shards are counted as they are, without the padding
            that torch sends with them; reductions are counted as rings.
    """

    collective: Collective
    axis: str
    layout: Layout
    received: int


def cheapest(start: Layout, end: Layout) -> list[Leg]:
    """Return the route on which the busiest rank receives least.

    Raises:
        LayoutError: The two are of different tensors or meshes, the end has a pending reduction that the start has
            not, no sequence of collectives leads there, or the map is too large.

    Example:
        >>> from shardviz.layout.mesh import parse_mesh
        >>> from shardviz.layout.notation import parse, write
        >>> mesh = parse_mesh("fsdp=2,tp=4")
        >>> start, end = (parse(text).layout(mesh) for text in ("[16/tp, 8] +fsdp", "[16/tp/fsdp, 8]"))
        >>> [(leg.collective, leg.axis, write(leg.layout), leg.received) for leg in cheapest(start, end)]
        [('reduce_scatter', 'fsdp', '[16/tp/fsdp, 8]', 16)]
    """
    import networkx as nx  # only here and in `_map`: its import takes longer than most commands

    _check_ends(start, end)
    graph = _map(start, end)
    goal = next((node for node in graph if _same(node, end)), None)
    if goal is None:
        raise LayoutError("no sequence of all_gather, reduce_scatter, all_reduce, all_to_all and slices leads there")
    path = nx.shortest_path(graph, _canonical(start), goal, weight="cost")
    legs: list[Leg] = [graph.edges[one, other]["leg"] for one, other in pairwise(path)]
    return legs


def total(legs: Sequence[Leg]) -> int:
    """Return the elements that the busiest rank receives on a route."""
    return sum(leg.received for leg in legs)


def torch_route(start: Layout, end: Layout) -> list[Leg] | None:
    """Return the route of torch's `redistribute`; None for strided shards and the like.

    The rule is `generate_greedy_transform_infos` of `torch.distributed.tensor._redistribute` (tried on torch 2.13): of
    a tensor that is split somewhere, axes are done last to first, gathering a split that lies inside one that changes;
    the rest is done first to last. On CPUs torch gathers and slices where this says all_to_all.
    """
    current, target = _shards(start), _shards(end)
    if current is None or target is None:
        return None
    legs: list[Leg] = []
    layout = start
    sizes = start.mesh.shape
    is_split = any(isinstance(one, Shard) and size > 1 for one, size in zip(current, sizes, strict=True))
    for axis, wanted in _greedy(list(current), target, is_split=is_split):
        before, current[axis] = current[axis], wanted
        following = Layout.from_placements(start.mesh, start.shape, current)
        legs.append(_leg(_collective(before, wanted), start.mesh.axes[axis], layout, following))
        layout = following
    return legs


def _greedy(current: list[Placement], target: list[Placement], *, is_split: bool) -> Iterator[tuple[int, Placement]]:
    """Yield torch's steps: an axis, and the placement that it changes to."""
    for axis in reversed(range(len(current))) if is_split and len(current) > 1 else ():
        wanted = target[axis]
        if isinstance(wanted, Shard) and _splitting(current, axis, wanted) != _splitting(target, axis, wanted):
            wanted = Replicate()
        if wanted != current[axis]:
            current[axis] = wanted
            yield axis, wanted
    for axis, wanted in enumerate(target):
        if wanted != current[axis]:
            current[axis] = wanted
            yield axis, wanted


def _splitting(placements: list[Placement], axis: int, shard: Shard) -> list[int]:
    return [outer for outer in range(axis) if placements[outer] == shard]


def _shards(layout: Layout) -> list[Placement] | None:
    placements = layout.placements()
    plain = (Shard, Replicate, Partial)
    fits = placements is not None and layout.flat is None and all(isinstance(one, plain) for one in placements)
    return list(placements) if fits and placements is not None else None


def _collective(before: Placement, after: Placement) -> Collective:
    if isinstance(before, Partial):
        return "all_reduce" if isinstance(after, Replicate) else "reduce_scatter"
    if isinstance(before, Shard):
        return "all_gather" if isinstance(after, Replicate) else "all_to_all"
    return "slice"


def _check_ends(start: Layout, end: Layout) -> None:
    if start.mesh != end.mesh or start.shape != end.shape or start.flat != end.flat:
        raise LayoutError(f"a route needs two layouts of one tensor, not from shape {start.shape} to {end.shape}")
    made = sorted({axis for axis, _ in end.partial} - {axis for axis, _ in start.partial})
    if made:
        raise LayoutError(
            f"no collective makes a sum pending over {', '.join(made)}", "drop the + from the second layout"
        )


def _map(start: Layout, end: Layout) -> nx.DiGraph[Layout]:
    """Return the graph of layouts that collectives reach from `start` on a way to `end`."""
    import networkx as nx

    first = _canonical(start)
    graph: nx.DiGraph[Layout] = nx.DiGraph()
    graph.add_node(first)
    waiting = [first]
    while waiting:
        layout = waiting.pop()
        for leg in _legs(layout, end):
            if leg.layout not in graph:
                waiting.append(leg.layout)
            graph.add_edge(layout, leg.layout, leg=leg, cost=leg.received + EACH)
        if len(graph) > MAX_LAYOUTS:
            raise LayoutError(
                f"more than {MAX_LAYOUTS:,} layouts of this tensor can be reached", "use a mesh with fewer axes"
            )
    return graph


def _canonical(layout: Layout) -> Layout:
    """Drop the parts that make no difference between layouts."""
    return replace(layout, partial=tuple(sorted(layout.partial)))


def _same(one: Layout, other: Layout) -> bool:
    return set(one.partial) == set(other.partial) and one.same_regions(other)


def _legs(layout: Layout, end: Layout) -> Iterator[Leg]:
    """Yield every collective that can follow."""
    for axis, _ in layout.partial:
        summed = _without_sum(layout, axis)
        yield _leg("all_reduce", axis, layout, summed)
        for split in _split_by(summed, axis, end):
            yield _leg("reduce_scatter", axis, layout, split)
    for axis in layout.replicate_axes:
        for split in _split_by(layout, axis, end):
            yield _leg("slice", axis, layout, split)
    for dim, chain in enumerate(layout.chains):
        for axis in axes_in(chain[-1:]):  # none if nothing splits the dim
            gathered = _with_chain(layout, dim, without_axis(chain, axis))
            yield _leg("all_gather", axis, layout, gathered)
            for split in _split_by(gathered, axis, end):
                if split.chains[dim] != chain:
                    yield _leg("all_to_all", axis, layout, split)


def _split_by(layout: Layout, axis: str, end: Layout) -> Iterator[Layout]:
    """Yield the layouts in which an axis splits a dim further, with the segments of `end` first."""
    for dim, chain in enumerate(layout.chains):
        yield _with_chain(layout, dim, (*chain, axis))
        wanted = end.chains[dim]
        if axis in wanted:
            upto = wanted[: wanted.index(axis) + 1]
            if upto[: len(chain)] == chain and all(isinstance(link, int) for link in upto[len(chain) : -1]):
                yield _with_chain(layout, dim, upto)


def _with_chain(layout: Layout, dim: int, chain: Chain) -> Layout:
    return replace(layout, chains=(*layout.chains[:dim], chain, *layout.chains[dim + 1 :]))


def _leg(collective: Collective, axis: str, before: Layout, after: Layout) -> Leg:
    coords, received = list(before.mesh.coords()), 0
    if collective in ("all_reduce", "reduce_scatter"):
        largest = max(before.region(coord).size for coord in coords)
        received = ring(collective, largest, before.mesh.axis_size(axis))
    elif collective == "all_gather":
        received = max(after.region(coord).size - before.region(coord).size for coord in coords)
    elif collective == "all_to_all":
        received = max(after.region(coord).size - _sizes_kept(before, after, coord) for coord in coords)
    return Leg(collective, axis, after, received)


def ring(collective: str, whole: int, count: int) -> int:
    """Return what each of `count` ranks receives of `whole`: (n - 1) / n; twice for all_reduce.

    Example:
        >>> ring("all_gather", 96, 4), ring("all_reduce", 96, 4)
        (72, 144)
    """
    rounds = 2 if collective == "all_reduce" else 1
    return -(-rounds * (count - 1) * whole // count)


def _sizes_kept(before: Layout, after: Layout, coord: tuple[int, ...]) -> int:
    """Return how many elements a rank has before and after."""
    kept = 1
    for one, other in zip(before.region(coord).dims, after.region(coord).dims, strict=True):
        kept *= sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)
    return kept


def gathering(layout: Layout) -> list[Leg]:
    """Return the collectives that bring all of the tensor to every rank, in order.

    Pending sums are taken first, while the shards are smallest; then the splits are undone, innermost first.

    Example:
        >>> from shardviz.layout.mesh import parse_mesh
        >>> from shardviz.layout.notation import parse
        >>> layout = parse("[16/tp/fsdp, 2]").layout(parse_mesh("fsdp=2,tp=4"))
        >>> [(leg.collective, leg.axis, leg.received) for leg in gathering(layout)]
        [('all_gather', 'fsdp', 4), ('all_gather', 'tp', 24)]
    """
    legs: list[Leg] = []
    for axis, _ in layout.partial:
        legs.append(_leg("all_reduce", axis, layout, _without_sum(layout, axis)))
        layout = legs[-1].layout
    while layout.split_axes:
        axis = _innermost(layout)
        whole = replace(layout, chains=tuple(without_axis(chain, axis) for chain in layout.chains))
        legs.append(_leg("all_gather", axis, layout, whole))
        layout = whole
    return legs


def _without_sum(layout: Layout, axis: str) -> Layout:
    return replace(layout, partial=tuple(pair for pair in layout.partial if pair[0] != axis))


def _innermost(layout: Layout) -> str:
    """Return the axis to undo: the last split of a dim, and of several the last on the mesh."""
    last = {axes_in(chain)[-1] for chain in layout.chains if axes_in(chain)}
    return next(axis for axis in reversed(layout.mesh.axes) if axis in last)


def without_axis(chain: Chain, axis: str) -> Chain:
    """Undo a dim's last split; segments that nothing distributes any more are whole again."""
    if axis not in chain:
        return chain
    left = chain[: chain.index(axis)]
    while left and not axes_in(left[-1:]):
        left = left[:-1]
    return left
