"""What a plan's step sends: collectives by axes, and which of their groups cross from node to node."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.costs.comms import groups_text, received
from shardviz.plan.folding import kind_of

if TYPE_CHECKING:
    from shardviz.dump.records.plan import PlanPart, PlanRecord
    from shardviz.dump.records.step import CollectiveRecord
    from shardviz.layout.mesh import Mesh

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """The collectives of one kind along some axes in one pass, on the busiest of the ranks that were asked.

    Attributes:
        axes: The axes that its groups run along.
        op: What it is.
        when: When it runs.
        count: How many there are.
        bytes: What they are about, together.
        received: Bytes that a rank receives.
        size: Ranks of a group.
        nodes: How many nodes a group spans at most; 0 if the size of a node is not given.
        modules: The modules that call it, numbers left out.
        within: The axes along which ranks of a group differ, if it runs along none of them from end to end.
    """

    axes: Axes
    op: str
    when: str
    count: int
    bytes: int
    received: int
    size: int
    nodes: int
    modules: tuple[str, ...]
    within: Axes = ()


def sent(plan: PlanRecord, mesh: Mesh) -> list[Sent]:
    """Return what a step sends, along the innermost axes first."""
    busiest: dict[object, Sent] = {}
    for kind, one in (item for part in plan.parts for item in _of_part(part, mesh, plan.node).items()):
        # By bytes, too: who sends receives nothing.
        busiest[kind] = max(busiest.get(kind, one), one, key=lambda one: (one.received, one.bytes))
    return sorted(busiest.values(), key=lambda one: (one.nodes, one.axes, -one.received))


def received_along(plan: PlanRecord, mesh: Mesh) -> dict[str, int]:
    """Return the bytes that the busiest rank receives along each axis, or axes, of a mesh."""
    most: Counter[str] = Counter()
    for part in plan.parts:
        along: Counter[str] = Counter()
        for one in _of_part(part, mesh, plan.node).values():
            along[where(one)] += one.received
        most |= along
    return most


def crossing(plan: PlanRecord, mesh: Mesh) -> int:
    """Return the bytes that the busiest rank receives in groups that span more than one node."""
    of_parts = (_of_part(part, mesh, plan.node).values() for part in plan.parts)
    return max((sum(one.received for one in sent_ if one.nodes > 1) for sent_ in of_parts), default=0)


def _of_part(part: PlanPart, mesh: Mesh, node: int) -> dict[object, Sent]:
    """Return what a rank sends, by axes, operation, pass and ranks of a group."""
    by_kind: dict[tuple[Axes, Axes, str, str, int], list[CollectiveRecord]] = {}
    for record in part.record.collectives:
        key = (record.axes, mesh.axes_within(record.ranks), record.op, record.when, record.size)
        by_kind.setdefault(key, []).append(record)
    return {
        (axes, within, op, when, size): Sent(
            axes=axes,
            op=op,
            when=when,
            count=sum(record.count for record in records),
            bytes=sum(record.bytes for record in records),
            received=sum(map(received, records)),
            size=size,
            nodes=max(_nodes(mesh, record, node) for record in records),
            modules=tuple(dict.fromkeys(kind_of(record.module) for record in records)),
            within=within,
        )
        for (axes, within, op, when, size), records in by_kind.items()
    }


def _nodes(mesh: Mesh, one: CollectiveRecord, node: int) -> int:
    """Return how many nodes a collective's group spans, on the rank that was asked if it runs along no axis."""
    if node and one.ranks:
        return len({rank // node for rank in one.ranks})
    return nodes_of(mesh, one.axes, node)


def where(one: Sent) -> str:
    """Say along which axes the groups of a collective run, or within which they lie."""
    return f"within {' and '.join(one.within)}" if one.within else groups_text(one.axes)


@lru_cache(maxsize=256)
def nodes_of(mesh: Mesh, axes: Axes, node: int) -> int:
    """Return how many nodes a group along some axes spans at most, ranks being laid on nodes in their order."""
    if not node or not axes:
        return 0
    places = [mesh.axes.index(axis) for axis in axes]
    laid = np.moveaxis(np.array(mesh.ranks).reshape(mesh.shape), places, range(-len(places), 0)) // node
    groups = np.sort(laid.reshape(-1, math.prod(mesh.axis_size(axis) for axis in axes)), axis=1)
    return 1 + int((np.diff(groups, axis=1) > 0).sum(axis=1).max())
