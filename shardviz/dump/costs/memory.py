"""Memory of tensors on every rank, by role and name, and of data parallel by formula.

A probe runs its step in float64, to be comparable; its gradients, optimizer state and activations are counted in the
model's own dtype. A pipeline captures the activations of one micro-batch; they are counted once for each micro-batch
that a rank has in flight. Activations kept only for the trace are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from shardviz.dump.records.trace import is_point
from shardviz.dump.whole_tensors import shape_before
from shardviz.errors import NotationError
from shardviz.layout.dtypes import itemsize
from shardviz.layout.notation import parse
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records.base import Role
    from shardviz.dump.records.step import StageRecord

ROLES: tuple[Role, ...] = ("param", "buffer", "grad", "optim", "activation")
"""The roles that stay in memory, in the order of columns."""

STATE: tuple[Role, ...] = ("param", "grad", "optim")
"""The roles that the closed formulas of data parallel count."""


def elements_text(count: int, dtype: str) -> str:
    """Write the bytes of some elements; their number, if the bytes of one are not known."""
    return bytes_text(count * itemsize(dtype)) if itemsize(dtype) else f"{count:,} elements"


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """The memory of one tensor.

    Attributes:
        name: Its name.
        role: What it is to the model.
        bytes: Its bytes on every rank that has it; of ranks that are equally full, on the first one.
        whole: Bytes of the unsharded tensor.
    """

    name: str
    role: Role
    bytes: dict[int, int]
    whole: int


@dataclass(frozen=True)
class CountedTensor:
    """A tensor that takes memory, or identical layers of one.

    Attributes:
        tensor: The tensor.
        widths: For each name that is counted, the bytes of an element in the model's own dtype.
        at_once: For each rank, how many of it are there at once.
    """

    tensor: Tensor
    widths: dict[str, int]
    at_once: Mapping[int, float]

    def on(self, rank: int, name: str | None = None) -> int:
        """Return the bytes on a rank, of one name or of all together; 0 if the rank has none of it."""
        if rank not in self.tensor.shards:
            return 0
        if self.at_once and name is None:
            return sum(self.on(rank, one) for one in self.widths)
        width = sum(self.widths.values()) if name is None else self.widths[name]
        return round(math.prod(self.tensor.shards[rank].body.local_shape) * width * self.at_once.get(rank, 1))

    def bytes(self, name: str, ranks: Collection[int]) -> dict[int, int]:
        """Return the bytes of a name on the ranks that have it, shared by names of one width."""
        width = self.widths[name]
        if width not in self._bytes:
            shards = self.tensor.shards
            few, others = (shards, ranks) if len(shards) < len(ranks) else (ranks, shards)
            self._bytes[width] = {rank: self.on(rank, name) for rank in few if rank in others}
        return self._bytes[width]

    @cached_property
    def _bytes(self) -> dict[int, dict[int, int]]:
        return {}


def counted_tensors(dump: Dump) -> list[CountedTensor]:
    """Return the tensors that take memory: parameters and buffers as sharded, others post-step."""
    before = dump.at("initial") or dump.at("stamped")
    step = [tensor for tensor in dump.at("step") if tensor.role in ("grad", "optim", "activation")]
    widths = {name: itemsize(tensor.dtype) for tensor in before for name in tensor.names}
    common = Counter(widths.values()).most_common(1)[0][0] if widths else 0
    leaves = _leaves(_outputs(dump, step))
    tied = {name for record, _ in dump.files.alike() for group in record.tied for name in group[1:]}
    at_once: dict[int, float] = {}
    for record, ranks in dump.files.alike():
        at_once |= dict.fromkeys(ranks, under_way(record.schedule))
    tensors = []
    for tensor in [*before, *step]:
        names = [name for name in tensor.names if owner_of(name, tensor.role) not in tied]
        if tensor.role == "activation":
            names = [name for name in names if name in leaves]
        if tensor.role in ROLES and names:
            by_name = {name: _width(tensor, name, widths, common) for name in names}
            tensors.append(CountedTensor(tensor, by_name, at_once if tensor.role == "activation" else {}))
    return tensors


def owner_of(name: str, role: str) -> str:
    """Return the parameter that a tensor belongs to: `up.weight` for `up.weight.exp_avg`."""
    return name.rpartition(".")[0] if role == "optim" else name


def memory_uses(dump: Dump) -> list[TensorMemory]:
    """Return the bytes of every name on every rank."""
    traced, ranks = _traced(dump), dict.fromkeys(group[0] for group in dump.files.equally_full)
    return [
        TensorMemory(
            name,
            count.tensor.role,
            count.bytes(name, ranks),
            math.prod(_whole_shape(dump, count.tensor, name, traced)) * width,
        )
        for count in counted_tensors(dump)
        for name, width in count.widths.items()
    ]


def _outputs(dump: Dump, step: Iterable[Tensor]) -> Iterator[str]:
    """Yield the activations that modules returned, not those kept only to explain a step."""
    before = {f"{call.module}.before" for record, _ in dump.files.alike() for call in record.calls}
    for tensor in step:
        if tensor.role == "activation":
            yield from (name for name in tensor.names if name not in before and not is_point(name))


def _whole_shape(dump: Dump, tensor: Tensor, name: str, traced: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return a tensor's shape in the unsharded model.

    An activation does not always say it: a plain one may be a part of the batch, and a DTensor on a part of the mesh
    knows its own micro-batch, or its own share of the batch, only.
    """
    if tensor.role != "activation":
        return shape_before(dump, tensor, name)
    whole = dump.find("reference", "activation", name)
    return whole.shape if whole is not None else traced.get(name, tensor.shape)


def _traced(dump: Dump) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of each module's output that the trace recorded."""
    shapes: dict[str, tuple[int, ...]] = {}
    for record, _ in dump.files.alike():
        for point in record.trace:
            is_first = point.what == "output" and point.call == point.index == 0
            if is_first and point.layout and point.module not in shapes:
                with suppress(NotationError):
                    sizes = parse(point.layout).sizes
                    shapes[point.module] = tuple(size for size in sizes if size is not None)
    return shapes


def under_way(schedule: Sequence[StageRecord]) -> float:
    """Return how many micro-batches a stage holds at most; 1 without a pipeline.

    Args:
        schedule: The passes of a rank's stages, in order; for several stages, their mean at the worst moment.
    """
    waiting = accumulate((-1 if one.backward else 1 for one in schedule), initial=0)
    stages = len({one.stage for one in schedule})
    return max(waiting) / stages if stages else 1.0


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The memory of a run as numbers, which text and HTML render.

    Attributes:
        roles: The roles that any tensor has, in the order of columns.
        by_rank: For each rank its bytes by role.
        wholes: The bytes of the unsharded model by role.
        uses: The tensors, the largest first.
        params: Bytes of all parameters.
        schemes: Schemes of data parallel by formula, and last the fullest rank of this run.
        under_way: How many micro-batches a rank's activations are counted for, least and most; 1 without a pipeline.
    """

    roles: tuple[Role, ...]
    by_rank: dict[int, tuple[int, ...]]
    wholes: tuple[int, ...]
    uses: tuple[TensorMemory, ...]
    params: int
    schemes: tuple[Scheme, ...]
    under_way: tuple[float, float]


def memory_table(dump: Dump) -> MemoryTable:
    """Return the bytes of a dump's tensors by rank, by tensor and by scheme."""
    largest_first = sorted(memory_uses(dump), key=lambda use: -max(use.bytes.values()))
    roles = tuple(role for role in ROLES if any(use.role == role for use in largest_first))
    by_first = {group[0]: dict.fromkeys(roles, 0) for group in dump.files.equally_full}
    same = Counter((id(use.bytes), use.role) for use in largest_first)
    for use in {(id(use.bytes), use.role): use for use in largest_first}.values():
        for rank, count in use.bytes.items():
            by_first[rank][use.role] += count * same[id(use.bytes), use.role]
    by_rank = {rank: tuple(by_first[group[0]].values()) for group in dump.files.equally_full for rank in group}
    params = sum(use.whole for use in largest_first if use.role == "param")
    fullest = max((sum(own.get(role, 0) for role in STATE) for own in by_first.values()), default=0)
    this = Scheme("this run", "the fullest rank", fullest)
    counts = [under_way(record.schedule) for record, _ in dump.files.alike() if record.schedule] or [1.0]
    return MemoryTable(
        roles=roles,
        by_rank=dict(sorted(by_rank.items())),
        wholes=tuple(sum(use.whole for use in largest_first if use.role == role) for role in roles),
        uses=tuple(largest_first),
        params=params,
        schemes=(*schemes(params, dump.files.run.num_ranks), this),
        under_way=(min(counts), max(counts)),
    )


def _width(tensor: Tensor, name: str, widths: dict[str, int], common: int) -> int:
    """Return the bytes of an element; for a step's results, those of their parameter's."""
    owner = name if name in widths else name.rpartition(".")[0]
    width = itemsize(tensor.dtype)
    return (widths.get(owner) or common or width) if tensor.moment == "step" else width


def _leaves(names: Iterable[str]) -> set[str]:
    """Return the modules without submodules: a block's output is its last layer's."""
    module_names = set(names)
    parents = {name[:at] for name in module_names for at in range(len(name)) if name[at] == "."}
    return module_names - parents


@dataclass(frozen=True, slots=True)
class Scheme:
    """The memory per rank of a scheme of data parallel with Adam, by the closed formula.

    Attributes:
        name: Its usual name.
        formula: For parameters of P bytes over N ranks.
        bytes: The formula's value.
    """

    name: str
    formula: str
    bytes: int


def schemes(params: int, num_ranks: int) -> list[Scheme]:
    """Return bytes per rank of parameters, gradients and Adam moments (Rajbhandari et al. 2020).

    Args:
        params: Bytes of all parameters.
        num_ranks: Ranks that share them evenly.
    """
    share = params / num_ranks
    return [
        Scheme("DDP", "P + P + 2P", 4 * params),
        Scheme("ZeRO 1", "P + P + 2P/N", math.ceil(2 * params + 2 * share)),
        Scheme("ZeRO 2", "P + P/N + 2P/N", math.ceil(params + 3 * share)),
        Scheme("ZeRO 3, FSDP", "P/N + P/N + 2P/N", math.ceil(4 * share)),
    ]
