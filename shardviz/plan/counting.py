"""What a plan says: the bytes that each rank holds by role, and what its step sends; names folded by layer, expert."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardviz.dump.costs import groups_text, owner_of, received_bytes
from shardviz.dump.plan import PlannedPart, PlannedRanks, sizes
from shardviz.dump.records.files import PeakRecord, PlanPart
from shardviz.groups import in_groups
from shardviz.layout.dtypes import itemsize
from shardviz.text import Fold, cut_at_number, fold

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.dump.records.tensors import Body
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh

ROLES = ("parameters", "buffers", "gradients", "optimizer", "buckets", "activations", "gathered")
"""What takes memory, in the order of columns.

Buckets are what DistributedDataParallel copies gradients into. Gathered is FSDP's: weights, and gradients before it has
reduced them.
"""

OF_A_STEP = ("activations", "gathered")
"""Roles that only a step tells. They peak at different moments on different ranks: their sum says nothing."""

OF = {"param": "parameters", "buffer": "buffers", "grad": "gradients", "optim": "optimizer"}

LARGE = 0.01
"""A tensor is large from this part of the parameters of the fullest rank."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor, or identical layers of it, on the ranks of a part, with its bytes.

    Attributes:
        name: Its name, or its folded names.
        role: A name in `ROLES`.
        body: What the rank that was asked has of it.
        count: How many names of it take memory.
        layout: What its placements claim; None for a plain tensor.
        sizes: Elements of one of them on each rank of the part.
        offloaded: How many of the names that take memory take that of a CPU.
    """

    name: str
    role: str
    body: Body
    count: int
    layout: Layout | None
    sizes: NDArray[np.int64]
    offloaded: int = 0

    @property
    def owner(self) -> str:
        """The parameter that it belongs to."""
        return owner_of(self.name, self.body.role)

    @property
    def bytes(self) -> NDArray[np.int64]:
        """Bytes of all of them on each rank of the part."""
        return self.sizes * (itemsize(self.body.dtype) * self.count)

    @property
    def on_gpu(self) -> NDArray[np.int64]:
        """Those of them that the GPU of each rank of the part has to hold."""
        return self.sizes * (itemsize(self.body.dtype) * (self.count - self.offloaded))


@dataclass(frozen=True)
class PlanBytes:
    """The bytes of a plan by rank and role.

    Attributes:
        ranks: The plan's ranks.
    """

    ranks: PlannedRanks

    @cached_property
    def held(self) -> tuple[tuple[PlannedPart, tuple[HeldTensor, ...]], ...]:
        """What every part has."""
        return tuple((part, tuple(_held_tensors(part))) for part in self.ranks.parts)

    @cached_property
    def by_role(self) -> dict[str, NDArray[np.int64]]:
        """Bytes on every rank of the mesh, by role."""
        by_role = {role: np.zeros(len(self.ranks), np.int64) for role in ROLES}
        for plan_part, held in self.held:
            ranks = np.array(plan_part.ranks)
            for amount in held:
                by_role[amount.role][ranks] += amount.bytes
            peak = plan_part.part.peak or PeakRecord(0, gathered_bytes(plan_part.part))
            by_role["buckets"][ranks] += sum(one.bytes for one in plan_part.part.buckets if not one.is_gradients)
            by_role["activations"][ranks] += peak.activations
            by_role["gathered"][ranks] += peak.gathered
        return by_role

    @cached_property
    def together(self) -> NDArray[np.int64]:
        """Bytes on every rank of the mesh."""
        total: NDArray[np.int64] = np.stack([*self.by_role.values()]).sum(axis=0)
        return total

    @cached_property
    def offloaded(self) -> NDArray[np.int64]:
        """Bytes of every rank of the mesh that are in a CPU's memory."""
        return self._sum_by_rank(lambda one: one.bytes - one.on_gpu)

    @property
    def on_gpu(self) -> NDArray[np.int64]:
        """Bytes of every rank of the mesh that its GPU has to hold."""
        return self.together - self.offloaded

    @cached_property
    def lasting(self) -> NDArray[np.int64]:
        """Bytes of every rank of the mesh that its GPU holds before, in and after a step."""
        return self._sum_by_rank(lambda one: one.on_gpu * (one.role != "gradients"))

    def _sum_by_rank(self, size: Callable[[HeldTensor], NDArray[np.int64]]) -> NDArray[np.int64]:
        total = np.zeros(len(self.ranks), np.int64)
        for plan_part, held in self.held:
            total[np.array(plan_part.ranks)] += sum(map(size, held))
        return total


def gathered_bytes(plan_part: PlanPart) -> int:
    """Return the most bytes that FSDP gathers: units that stay, the largest other and its next."""
    stays = sum(unit.bytes for unit in plan_part.units if unit.stays)
    others = [unit.bytes for unit in plan_part.units if not unit.stays]
    pairs = [sum(others[at : at + 2]) for at in range(len(others))]
    return stays + max(pairs, default=0)


def _held_tensors(planned_part: PlannedPart) -> Iterator[HeldTensor]:
    record = planned_part.part.record
    tied = {name for group in record.tied for name in group[1:]}
    units = {unit.name: unit.on_cpu for unit in planned_part.part.units}
    for tensor in record.tensors:
        body = record.bodies[tensor.body]
        fold = Fold(tensor.name, tensor.numbers, tensor.suffix)
        owners = [owner for name in fold.names() if (owner := owner_of(name, body.role)) not in tied]
        if body.role in OF and owners:
            on_cpu = sum(_is_offloaded(owner, units) for owner in owners) if body.role != "buffer" else 0
            layout = None if body.layout is None else planned_part.layout(record.rank, body.layout)
            yield HeldTensor(
                str(fold), OF[body.role], body, len(owners), layout, sizes(planned_part, tensor.body), on_cpu
            )


def _is_offloaded(owner: str, units: Mapping[str, bool]) -> bool:
    """Whether the innermost FSDP unit around a parameter keeps it in CPU memory."""
    modules = owner.split(".")[:-1]
    around = (".".join(modules[:depth]) for depth in range(len(modules), -1, -1))
    return next((units[name] for name in around if name in units), False)


@dataclass(frozen=True, slots=True)
class UnevenParameter:
    """A parameter whose shards differ in size.

    Attributes:
        held: The parameter.
        least: Elements of the smallest part.
        most: Elements of the largest part.
        empty: How many ranks have none.
        ranks: How many ranks have the parameter.
    """

    held: HeldTensor
    least: int
    most: int
    empty: int
    ranks: int


def uneven_parameters(amounts: PlanBytes) -> list[UnevenParameter]:
    """Return the parameters whose parts differ in size from rank to rank, the emptiest first.

    Those of FSDP1's flat parameters do not count: these are cut into equal parts, wherever one of them ends.
    """
    by_name = in_groups(
        (amount.name, amount) for _, held in amounts.held for amount in held if amount.role == "parameters"
    )
    parameters = []
    for same in by_name.values():  # in all parts of the plan
        sizes = np.concatenate([one.sizes for one in same])
        is_flat = same[0].layout is not None and same[0].layout.flat is not None
        if sizes.min() < sizes.max() and not is_flat:
            empty = int((sizes == 0).sum())
            parameters.append(UnevenParameter(same[0], int(sizes.min()), int(sizes.max()), empty, len(sizes)))
    return sorted(parameters, key=lambda one: (-one.empty / one.ranks, -(one.most - one.least)))


@dataclass(frozen=True, slots=True)
class ReplicatedParameter:
    """A large parameter that is replicated along an axis that splits other parameters.

    Attributes:
        held: The parameter.
        size: Ranks along it.
        saved: Bytes that a rank would save, with gradient and optimizer state.
    """

    held: HeldTensor
    axis: str
    size: int
    saved: int


def unsplit_parameters(amounts: PlanBytes) -> list[ReplicatedParameter]:
    """Return large unsplit parameters that an axis in use could split, largest saving first."""
    most = int(amounts.by_role["parameters"].max())
    by_axis: dict[tuple[str, str], ReplicatedParameter] = {}
    for _, held in amounts.held:
        params = [one for one in held if one.role == "parameters" and one.layout is not None]
        used = {axis for one in params if one.layout for axis in one.layout.split_axes}
        large = (one for one in params if int(one.bytes.max()) >= LARGE * most)
        for copied in (copied for one in large for copied in _copied(one, held, used)):
            key = (copied.held.name, copied.axis)
            by_axis[key] = max(by_axis.get(key, copied), copied, key=lambda one: one.saved)
    return sorted(by_axis.values(), key=lambda one: -one.saved)


def _copied(parameter: HeldTensor, held: tuple[HeldTensor, ...], used: set[str]) -> Iterator[ReplicatedParameter]:
    """Yield what sharding a parameter, its gradient and state would save, by axis."""
    assert parameter.layout is not None
    after = [other for other in held if other.role in ("gradients", "optimizer") and other.owner == parameter.name]
    size_of_all = sum(int(other.bytes.max()) for other in (parameter, *after))
    for axis in parameter.layout.replicate_axes:
        size = parameter.layout.mesh.axis_size(axis)
        if size > 1 and axis in used and any(dim >= size for dim in parameter.body.local_shape):
            yield ReplicatedParameter(parameter, axis, size, size_of_all * (size - 1) // size)


@dataclass(frozen=True, slots=True)
class CollectiveTraffic:
    """Collectives of one kind along some axes in one pass, on the busiest recorded rank.

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

    axes: tuple[str, ...]
    op: str
    when: str
    count: int
    bytes: int
    received: int
    size: int
    nodes: int
    modules: tuple[str, ...]
    within: tuple[str, ...] = ()


def sent_collectives(ranks: PlannedRanks) -> list[CollectiveTraffic]:
    """Return what a step sends, along the innermost axes first."""
    busiest: dict[object, CollectiveTraffic] = {}
    for kind, sending in (traffic for of_part in _of_parts(ranks) for traffic in of_part.items()):
        # By bytes, too: who sends receives nothing.
        busiest[kind] = max(busiest.get(kind, sending), sending, key=lambda one: (one.received, one.bytes))
    return sorted(busiest.values(), key=lambda one: (one.nodes, one.axes, -one.received))


def received_along(ranks: PlannedRanks) -> dict[str, int]:
    """Return the bytes that the busiest rank receives along each axis, or axes, of a mesh."""
    most: Counter[str] = Counter()
    for of_part in _of_parts(ranks):
        along: Counter[str] = Counter()
        for sending in of_part.values():
            along[where_text(sending)] += sending.received
        most |= along
    return most


def crossing_bytes(ranks: PlannedRanks) -> int:
    """Return the bytes that the busiest rank receives in groups that span more than one node."""
    of_parts = (of_part.values() for of_part in _of_parts(ranks))
    return max((sum(sending.received for sending in sent if sending.nodes > 1) for sent in of_parts), default=0)


def _of_parts(ranks: PlannedRanks) -> Iterator[dict[object, CollectiveTraffic]]:
    """Yield what a rank of each part sends, by axes, operation, pass and ranks of a group."""
    mesh, node = ranks.mesh, ranks.plan.node
    for plan_part in ranks.plan.parts:
        by_kind = in_groups(
            ((record.axes, mesh.axes_within(record.ranks), record.op, record.when, record.size), record)
            for record in plan_part.record.collectives
        )
        yield {
            (axes, within, op, when, size): CollectiveTraffic(
                axes=axes,
                op=op,
                when=when,
                count=sum(record.count for record in records),
                bytes=sum(record.bytes for record in records),
                received=sum(map(received_bytes, records)),
                size=size,
                nodes=max(
                    len({rank // node for rank in record.ranks})
                    if node and record.ranks
                    else nodes_of(mesh, record.axes, node)
                    for record in records
                ),
                modules=tuple(dict.fromkeys(kind_of(record.module) for record in records)),
                within=within,
            )
            for (axes, within, op, when, size), records in by_kind.items()
        }


def where_text(one: CollectiveTraffic) -> str:
    """Say along which axes the groups of a collective run, or within which they lie."""
    return f"within {' and '.join(one.within)}" if one.within else groups_text(one.axes)


@lru_cache(maxsize=256)
def nodes_of(mesh: Mesh, axes: tuple[str, ...], node: int) -> int:
    """Return how many nodes a group along some axes spans at most; ranks fill nodes in order."""
    if not node or not axes:
        return 0
    places = [mesh.axes.index(axis) for axis in axes]
    laid = np.moveaxis(np.array(mesh.ranks).reshape(mesh.shape), places, range(-len(places), 0)) // node
    groups = np.sort(laid.reshape(-1, mesh.size_over(axes)), axis=1)
    return 1 + int((np.diff(groups, axis=1) > 0).sum(axis=1).max())


Key = TypeVar("Key", bound="Hashable")

NUMBERS = re.compile(r"(?<![^.])\[[0-9,-]+\](?![^.])")
"""The numbers of a folded name: `[0-3,7]`."""

_FOLDED = re.compile(r"(?P<before>.*?)\[(?P<numbers>[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)\](?P<after>.*)")


def unfold(name: str) -> list[str]:
    """Return the names that a folded one, `layers.[0-3,7].experts.[0-7].weight`, stands for."""
    match = _FOLDED.fullmatch(name)
    if match is None:
        return [name]
    spans = (span.partition("-") for span in match["numbers"].split(","))
    numbers = (number for first, _, last in spans for number in range(int(first), int(last or first) + 1))
    afters = unfold(match["after"])
    return [f"{match['before']}{number}{after}" for number in numbers for after in afters]


def fold_all(named: Iterable[tuple[str, Key]]) -> list[tuple[str, Key, int, int]]:
    """Fold equal layers of all pipeline stages, and what is equal within them.

    Returns:
        Each fold as text, its key, how many names it has in a layer, and how many in all.

    Example:
        >>> fold_all([("layers.[0-3].w", 8), ("layers.[4-6].w", 8), ("layers.7.w", 8), ("norm.w", 8)])
        [('layers.[0-7].w', 8, 1, 8), ('norm.w', 8, 1, 1)]
    """
    layers = fold((single, key) for name, key in named for single in unfold(name))
    folds = fold_again((str(layer), (key, len(layer))) for layer, key in layers)
    return [(name, key, in_each, count * in_each) for name, (key, count), in_each in folds]


def fold_again(named: Iterable[tuple[str, Key]]) -> list[tuple[str, Key, int]]:
    """Fold names that share everything but their last number, and a key.

    Returns:
        Each fold as text, its key, and how many names it has.

    Example:
        >>> fold_again([("layers.[0-3].experts.0.w", 8), ("layers.[0-3].experts.1.w", 8), ("layers.4.w", 8)])
        [('layers.[0-3].experts.[0-1].w', 8, 2), ('layers.4.w', 8, 1)]
    """
    return [(str(folded), key, len(folded)) for folded, key in fold(named, by_last=True)]


def kind_of(module: str) -> str:
    """Return a name with a star for its first number or folded numbers: layers are alike.

    Example:
        >>> kind_of("layers.7.w1"), kind_of("layers.[0-3,7].w1"), kind_of("layers.[0-3].experts.0.w1")
        ('layers.*.w1', 'layers.*.w1', 'layers.*.experts.0.w1')
    """
    starred = NUMBERS.sub("*", module)
    before, number, after = cut_at_number(starred)
    return starred if number is None or "*" in before else f"{before}*{after}"
