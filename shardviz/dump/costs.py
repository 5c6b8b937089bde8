"""What a run costs: memory by rank, role and name, a step's collectives, and a pipeline's schedule with its bubble.

A probe runs its step in float64, to be comparable; its gradients, optimizer state and activations are counted in the
model's own dtype. A pipeline captures the activations of one micro-batch; they are counted once for each micro-batch
that a rank has in flight. Activations kept only for the trace are not counted.

The order of a pipeline's passes on each rank is the real one. Time is counted in forward passes of one stage; a
backward takes two.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.records.trace import is_point
from shardviz.dump.tensor import shape_before
from shardviz.errors import NotationError, ShardvizError
from shardviz.layout.dtypes import itemsize
from shardviz.layout.notation import parse
from shardviz.layout.routes import ring
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records.base import Role
    from shardviz.dump.records.step import CollectiveRecord, StageRecord

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
    leaves = _leaves(dump, step)
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


def _leaves(dump: Dump, step: Iterable[Tensor]) -> set[str]:
    """Return modules without submodules whose outputs are there: a block's is its last layer's.

    Activations that are kept only to explain a step are left out.
    """
    before = {f"{call.module}.before" for record, _ in dump.files.alike() for call in record.calls}
    activations = (name for tensor in step if tensor.role == "activation" for name in tensor.names)
    names = {name for name in activations if name not in before and not is_point(name)}
    return names - {name[:at] for name in names for at in range(len(name)) if name[at] == "."}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The memory per rank of a scheme of data parallel with Adam, by the closed formula.

    Attributes:
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


Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective in one module, as the busiest of its ranks saw it.

    Attributes:
        record: What that rank wrote.
        ranks: The ranks that took part in one like it, rising.
    """

    record: CollectiveRecord
    ranks: tuple[int, ...]

    @property
    def received(self) -> int:
        """The bytes that the busiest rank receives."""
        return received_bytes(self.record)


def groups_text(axes: Sequence[str]) -> str:
    """Say along which axes groups of ranks run."""
    return f"along {' and '.join(axes)}" if axes else "over ranks that are not along any axis"


def received_bytes(record: CollectiveRecord) -> int:
    """Return the bytes that one rank receives in a ring: (n - 1) / n; twice that for all_reduce."""
    if record.op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        return ring(record.op, record.bytes, record.size)
    return 0 if record.op in ("send", "barrier") else record.bytes


def why_no_traffic(dump: Dump) -> str:
    """Say in a line why a dump has no collectives."""
    if dump.at("step"):
        return "a step ran, and no rank sent anything to another rank"
    return "no step was captured: only a probe with a batch() runs a step"


def traffic(dump: Dump) -> list[Traffic]:
    """Return the step's collectives, with one entry for those that are alike on all ranks."""
    groups: dict[tuple[object, ...], list[tuple[CollectiveRecord, tuple[int, ...]]]] = {}
    for rank, alike in dump.files.alike():
        records: dict[tuple[object, ...], CollectiveRecord] = {}
        for record in rank.collectives:
            key = (record.axes, record.op, record.module, record.when, record.size)
            records[key] = _together(records[key], record) if key in records else record
        for same, record in records.items():
            groups.setdefault(same, []).append((record, alike))
    busiest = [max((record for record, _ in same), key=lambda record: record.bytes) for same in groups.values()]
    all_ranks = [sorted(chain.from_iterable(ranks for _, ranks in same)) for same in groups.values()]
    return [Traffic(record, tuple(ranks)) for record, ranks in zip(busiest, all_ranks, strict=True)]


def _together(one: CollectiveRecord, other: CollectiveRecord) -> CollectiveRecord:
    """Merge a rank's records of two groups along equal axes, such as a stage's two directions."""
    return structs.replace(one, count=one.count + other.count, bytes=one.bytes + other.bytes)


def received_by_axes(dump: Dump) -> dict[Axes, int]:
    """Return the bytes that the busiest rank receives, by a group's axes, single axes first."""
    most: dict[Axes, int] = {}
    for rank, _ in dump.files.alike():
        num_bytes: dict[Axes, int] = {}
        for record in rank.collectives:
            num_bytes[record.axes] = num_bytes.get(record.axes, 0) + received_bytes(record)
        for axes, count in num_bytes.items():
            most[axes] = max(most.get(axes, 0), count)
    return {axes: most[axes] for axes in sorted(most, key=lambda names: (len(names), names))}


FORWARD, BACKWARD = 1, 2
"""How long a pass takes."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""A rank's first stage, its second, ...: small letters run forward, capitals backward."""

Pass = tuple[int, int, bool]
"""Stage, micro-batch, whether backward."""


@dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Attributes:
        begins: For every rank, in its order: each pass with the time at which it begins.
        length: When the last pass ends.
    """

    begins: Mapping[int, tuple[tuple[StageRecord, int], ...]]
    length: int

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches there are."""
        return 1 + max(record.microbatch for passes in self.begins.values() for record, _ in passes)

    @cached_property
    def stages(self) -> dict[int, list[int]]:
        """The stages that each rank ran, rising."""
        return {rank: sorted({record.stage for record, _ in passes}) for rank, passes in self.begins.items()}

    @property
    def stages_per_rank(self) -> int:
        """How many stages the rank with most of them has."""
        return max(map(len, self.stages.values()))

    def label(self, rank: int, record: StageRecord) -> str:
        """Label one pass of a rank: a letter for the stage, then the micro-batch."""
        letter = LETTERS[self.stages[rank].index(record.stage) % len(LETTERS)]
        return f"{letter.upper() if record.backward else letter}{record.microbatch}"

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they are idle."""
        busy = sum(duration(record) for passes in self.begins.values() for record, _ in passes)
        return 1 - busy / (self.length * len(self.begins))

    @property
    def formula(self) -> float:
        """The bubble by the closed formula, (p - 1) / (v m + p - 1)."""
        ranks = len(self.begins)
        return (ranks - 1) / (self.stages_per_rank * self.num_microbatches + ranks - 1)


def duration(record: StageRecord) -> int:
    """Return how long a pass takes."""
    return BACKWARD if record.backward else FORWARD


def timeline_of(dump: Dump) -> Timeline | None:
    """Return the timeline of the pipeline that the lowest rank is in; None if no pipeline ran.

    Of the ranks that ran the same stages, only the lowest is kept.

    Raises:
        ShardvizError: Some pass waits for one that no rank ran before.
    """
    schedules: dict[frozenset[int], tuple[int, Sequence[StageRecord]]] = {}
    for record, ranks in sorted(dump.files.alike(), key=lambda one: one[1]):
        if record.schedule:
            schedules.setdefault(frozenset(one.stage for one in record.schedule), (ranks[0], record.schedule))
    return timeline(dict(sorted(schedules.values(), key=lambda one: one[0]))) if schedules else None


def timeline(schedules: Mapping[int, Sequence[StageRecord]]) -> Timeline:
    """Let every pass begin as soon as its rank is free and the passes that it needs have ended.

    Args:
        schedules: The passes of each rank of one pipeline, in order.

    Raises:
        ShardvizError: Some pass waits for one that no rank ran before.
    """
    last = max(record.stage for records in schedules.values() for record in records)
    ended: dict[Pass, int] = {}
    begins: dict[int, list[tuple[StageRecord, int]]] = {rank: [] for rank in schedules}
    free = dict.fromkeys(schedules, 0)
    waiting = True
    while waiting:
        waiting = False
        for rank, records in schedules.items():
            while len(begins[rank]) < len(records):
                record = records[len(begins[rank])]
                needed = _needed(record, last)
                if any(one not in ended for one in needed):
                    break
                begin = max([free[rank], *(ended[one] for one in needed)])
                begins[rank].append((record, begin))
                free[rank] = begin + duration(record)
                ended[record.stage, record.microbatch, record.backward] = free[rank]
                waiting = True
    late = [rank for rank, records in schedules.items() if len(begins[rank]) < len(records)]
    if late:
        record = schedules[late[0]][len(begins[late[0]])]
        raise ShardvizError(
            f"rank {late[0]} ran stage {record.stage} on micro-batch {record.microbatch} before its inputs",
            "the dump lacks a rank of the pipeline",
        )
    return Timeline({rank: tuple(passes) for rank, passes in begins.items()}, max(free.values()))


def _needed(record: StageRecord, last: int) -> list[Pass]:
    """Return the passes whose results a pass needs."""
    stage, microbatch = record.stage, record.microbatch
    if not record.backward:
        return [(stage - 1, microbatch, False)] if stage else []
    later: list[Pass] = [(stage + 1, microbatch, True)] if stage < last else []
    return [(stage, microbatch, False), *later]
