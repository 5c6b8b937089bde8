"""Bytes of a plan on every rank, by role: counted over the mesh at once, a layout at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.costs.memory import owner_of
from shardviz.dump.planned.sizes import sizes
from shardviz.dump.records.plan import PeakRecord
from shardviz.layout.dtypes import itemsize
from shardviz.text import Fold

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.dump.planned.ranks import PlannedPart, PlannedRanks
    from shardviz.dump.records.plan import PlanPart
    from shardviz.dump.records.tensors import Body, TensorRecord
    from shardviz.layout.layout import Layout

ROLES = ("parameters", "buffers", "gradients", "optimizer", "buckets", "activations", "gathered")
"""What takes memory, in the order of columns.

Buckets are what DistributedDataParallel copies gradients into. Gathered is FSDP's: weights, and gradients before it has
reduced them.
"""

OF_A_STEP = ("activations", "gathered")
"""Roles that only a step tells. They peak at different moments on different ranks: their sum says nothing."""

OF = {"param": "parameters", "buffer": "buffers", "grad": "gradients", "optim": "optimizer"}


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor, or identical layers of it, on the ranks of a part.

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
class Amounts:
    """The bytes of a plan.

    Attributes:
        ranks: The plan's ranks.
    """

    ranks: PlannedRanks

    @cached_property
    def held(self) -> tuple[tuple[PlannedPart, tuple[Held, ...]], ...]:
        """What every part has."""
        return tuple((part, tuple(_held(part))) for part in self.ranks.parts)

    @cached_property
    def by_role(self) -> dict[str, NDArray[np.int64]]:
        """Bytes on every rank of the mesh, by role."""
        found = {role: np.zeros(len(self.ranks), np.int64) for role in ROLES}
        for part, held in self.held:
            ranks = np.array(part.ranks)
            for one in held:
                found[one.role][ranks] += one.bytes
            peak = part.part.peak or PeakRecord(0, gathered(part.part))
            found["buckets"][ranks] += sum(one.bytes for one in part.part.buckets if not one.is_gradients)
            found["activations"][ranks] += peak.activations
            found["gathered"][ranks] += peak.gathered
        return found

    @cached_property
    def together(self) -> NDArray[np.int64]:
        """Bytes on every rank of the mesh."""
        total: NDArray[np.int64] = sum(self.by_role.values(), np.zeros(len(self.ranks), np.int64))
        return total

    @cached_property
    def offloaded(self) -> NDArray[np.int64]:
        """Bytes of every rank of the mesh that are in a CPU's memory."""
        found = np.zeros(len(self.ranks), np.int64)
        for part, held in self.held:
            ranks = np.array(part.ranks)
            for one in held:
                found[ranks] += one.bytes - one.on_gpu
        return found

    @property
    def on_gpu(self) -> NDArray[np.int64]:
        """Bytes of every rank of the mesh that its GPU has to hold."""
        on_gpu: NDArray[np.int64] = self.together - self.offloaded
        return on_gpu

    @cached_property
    def lasting(self) -> NDArray[np.int64]:
        """Bytes of every rank of the mesh that its GPU holds before, in and after a step."""
        found = np.zeros(len(self.ranks), np.int64)
        for part, held in self.held:
            found[np.array(part.ranks)] += sum(one.on_gpu for one in held if one.role != "gradients")
        return found

    @property
    def fullest(self) -> int:
        """The rank with most bytes on its GPU."""
        return int(self.on_gpu.argmax())

    @property
    def emptiest(self) -> int:
        """The rank with fewest bytes on its GPU."""
        return int(self.on_gpu.argmin())


def gathered(part: PlanPart) -> int:
    """Return what FSDP has gathered at most: units that stay gathered, the largest other one and the one after it."""
    stays = sum(unit.bytes for unit in part.units if unit.stays)
    others = [unit.bytes for unit in part.units if not unit.stays]
    pairs = [sum(others[at : at + 2]) for at in range(len(others))]
    return stays + max(pairs, default=0)


def _held(part: PlannedPart) -> list[Held]:
    record = part.part.record
    tied = {name for group in record.tied for name in group[1:]}
    units = {unit.name: unit.on_cpu for unit in part.part.units}
    found = []
    for tensor in record.tensors:
        body = record.bodies[tensor.body]
        names = Fold(tensor.name, tensor.numbers, tensor.suffix).names()
        owners = [owner for name in names if (owner := owner_of(name, body.role)) not in tied]
        if body.role in OF and owners:
            on_cpu = sum(_is_offloaded(owner, units) for owner in owners) if body.role != "buffer" else 0
            found.append(_one(part, tensor, body, len(owners), on_cpu))
    return found


def _is_offloaded(owner: str, units: Mapping[str, bool]) -> bool:
    """Whether the innermost of FSDP's units that has a parameter keeps it in the CPU's memory.

    Args:
        owner: The parameter's name.
        units: Whether each unit does, by the name of its module.
    """
    modules = owner.split(".")[:-1]
    around = (".".join(modules[:depth]) for depth in range(len(modules), -1, -1))
    return next((units[name] for name in around if name in units), False)


def _one(part: PlannedPart, tensor: TensorRecord, body: Body, count: int, on_cpu: int) -> Held:
    name = str(Fold(tensor.name, tensor.numbers, tensor.suffix))
    layout = None if body.layout is None else part.layout(part.part.record.rank, body.layout)
    return Held(name, OF[body.role], body, count, layout, sizes(part, tensor.body), on_cpu)
