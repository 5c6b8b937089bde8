"""A whole plan: a probe's model on an imagined mesh, as a dump or a row of `plan --gpus`.

The probe's module and its model on the meta device are the same for all meshes.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.plan import PlannedRanks
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import PlanRecord, RunRecord
from shardviz.errors import ProbeError, ShardvizError
from shardviz.live.capture.capture import run_record
from shardviz.live.dumping import check_intended
from shardviz.live.noting import is_library
from shardviz.live.plan.choosing import choose, rank_along
from shardviz.live.plan.forks import answers, ask, is_own, one_line
from shardviz.live.plan.optimizers import Optimizer, dtype_of
from shardviz.live.plan.rank import Reply, answer, early_model, without_groups
from shardviz.live.plan.reads import variables_read
from shardviz.live.probe import load_probe
from shardviz.live.world.torchrun import environment_of, variables
from shardviz.machine import cores
from shardviz.plan.alternatives import Row, row_of
from shardviz.plan.counting import PlanBytes
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from types import ModuleType

    from torch import nn

    from shardviz.layout.mesh import Mesh
    from shardviz.probe_files import Probe

    Again = Callable[[], tuple[ModuleType, tuple[str, ...]]]


ONLY_ONCE = "the probe cannot be imported twice, so all ranks have what rank 0 reads while it is imported: {}"


@dataclass(frozen=True)
class PlanJob:
    """What is planned.

    Attributes:
        node: GPUs of a node; 0 if it is not given.
        optimizer: The optimizer whose state counts.
        batch: Shape and element type of the batch; None for the probe's own.
        with_step: Whether a step is planned.
        double: Whether the model is planned in float64, as a probe runs.
        command: The command line, for the record.
    """

    probe: Probe
    mesh: Mesh
    node: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch: tuple[tuple[int, ...], str] | None = None
    with_step: bool = True
    double: bool = False
    command: tuple[str, ...] = ()

    @property
    def per_node(self) -> int:
        """Ranks of a node; all of them if nobody said how many."""
        return self.node or self.mesh.size


@dataclass(frozen=True)
class Loaded:
    """A probe, with its model: the same for plans on all meshes.

    Attributes:
        early: The model on the meta device, built before there were ranks; None if it may not be the same on all.
        again: Imports the module again, on a rank, and says what is not true of it; None if it is the same on all.
    """

    module: ModuleType
    early: nn.Module | None = None
    again: Again | None = None

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different layers."""
        return tuple(getattr(self.module, "STAGE_AXES", ()))


def load(job: PlanJob) -> Loaded:
    """Import a job's probe as its first rank does, and build its model.

    Raises:
        ShardvizError: The probe cannot be imported, or torch lacks an element type that was asked for.
    """
    for name in (job.optimizer.dtype, job.batch[1] if job.batch else ""):
        if name:
            dtype_of(name)
    modules, size = set(sys.modules), job.mesh.size
    with contextlib.redirect_stdout(sys.stderr):  # what a probe prints is not data
        with environment_of(0, size, job.per_node), variables_read() as read, without_groups():
            module = _import(job.probe)
        check_intended(getattr(module, "expect", {}))
        of_ranks = [variables(rank, size, job.per_node) for rank in (0, min(1, size - 1), size - 1)]
        if any(len({values[name] for values in of_ranks}) > 1 for name in read):
            return Loaded(module, again=_importer(job, module, set(sys.modules) - modules))
        return Loaded(module, early_model(job, module))


def _importer(job: PlanJob, module: ModuleType, names: set[str]) -> Again:
    """Return how a rank imports a probe again, together with the user's own modules."""
    files = {name: getattr(sys.modules[name], "__file__", None) or "<" for name in names}
    user_modules = [name for name, file in files.items() if is_own(file) and not is_library(file)]
    modules = {name: sys.modules[name] for name in user_modules}

    def once() -> ModuleType:
        for name in user_modules:
            sys.modules.pop(name, None)
        return _import(job.probe)

    def again() -> tuple[ModuleType, tuple[str, ...]]:
        try:
            return once(), ()
        except ProbeError as error:
            with environment_of(0, job.mesh.size, job.per_node):
                try:
                    once()
                except ProbeError:
                    sys.modules.update(modules)
                    return module, (ONLY_ONCE.format(error.message),)
            raise  # only this rank cannot import it

    return again


def _import(probe: Probe) -> ModuleType:
    """Import a probe."""
    try:
        return load_probe(probe.path, probe.build, probe.module)
    except ShardvizError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"importing {probe.name} raised {one_line(error)}"
        raise ProbeError(raised, f"python {probe.path} shows where") from error


def plan(job: PlanJob) -> tuple[RunRecord, PlanRecord]:
    """Plan a job, and return the two files of its dump.

    Raises:
        ShardvizError: The model cannot be built or sharded without ranks, or too many ranks differ.
    """
    loaded = load(job)
    record = _planned(job, loaded)
    name, intended = job.probe.name, getattr(loaded.module, "expect", {})
    run = run_record(job.mesh.size, job.mesh, job.command, run_id=record.run_id, probe=name, intended=intended)
    return run, record


def _planned(job: PlanJob, loaded: Loaded, most: int = 0, *, needs_step: bool = False) -> PlanRecord:
    """Ask ranks, as many at a time as is said, and return the plan."""
    if hasattr(loaded.module, "check_mesh"):
        loaded.module.check_mesh(job.mesh)

    def ask_ranks(ranks: Sequence[int], stepped: Collection[int]) -> dict[int, Reply]:
        return ask(ranks, lambda rank: answer(replace(job, with_step=rank in stepped), loaded, rank), most)

    why = "" if job.with_step else "--no-step was given"
    replies = choose(job.mesh, ask_ranks, loaded.stage_axes, without_step=why, needs_step=needs_step)
    run_id = secrets.token_hex(8)
    parts = tuple(
        structs.replace(
            reply.plan_part, at=at, record=structs.replace(reply.plan_part.record, run_id=run_id, hostname="")
        )
        for reply, at in replies.parts
    )
    stands = f"{counted(len(replies.by_rank), 'rank')} of {job.mesh.size:,} asked"
    apart = f"; the code tells ranks apart along {', '.join(replies.axes)}" if replies.axes else ""
    notes = dict.fromkeys([*(line for reply, _ in replies.parts for line in reply.how), *replies.notes()])
    optimizer = next((reply.optimizer for reply, _ in replies.parts if reply.optimizer), "")
    how = (stands + apart, *notes)
    return PlanRecord(SCHEMA, parts, run_id, job.node, optimizer, how, replies.failed, replies.step_fails)


def rows(job: PlanJob, tried: Sequence[Mesh], memory: int, ended: Callable[[], None] = lambda: None) -> Iterator[Row]:
    """Plan meshes side by side, each in a fork, and yield a row for each when it is known.

    A rank or two of each mesh are looked at first, without a step: the mesh is planned if it may fit and leaves no rank
    idle, and only in brief if its step fails, unless all do. Those that need more bytes than a GPU's `memory`, which is
    0 if nobody gives it, come last. `ended` is called when a mesh has been planned, or looked at.

    Raises:
        ShardvizError: The probe cannot be loaded.
    """
    loaded = load(job)
    share = max(1, cores() // len(tried))
    large: list[Row] = []

    def planned(places: Iterable[int], *, needs_step: bool) -> Iterator[Row]:
        def work(place: int) -> Row | int:
            return _row(replace(job, mesh=tried[place]), loaded, memory, share, needs_step=needs_step)

        for place, row in answers(places, work, patience=math.inf):
            if needs_step == job.with_step:  # once for each mesh
                ended()
            if isinstance(row, int):
                large.append(Row(tried[place], row, place=place))
            elif isinstance(row, ShardvizError):
                yield Row(tried[place], failed=row.message, place=place)
            else:
                yield replace(row, place=place)

    failing: list[Row] = []
    has_step = False
    for row in planned(range(len(tried)), needs_step=job.with_step):
        if row.step_fails != "no":
            failing.append(row)
            continue
        has_step = has_step or not (row.failed or row.without_step)
        yield row
    yield from failing if has_step else planned([row.place for row in failing], needs_step=False)
    yield from _too_large(job, loaded, large, len(tried))


def _row(job: PlanJob, loaded: Loaded, memory: int, most: int, *, needs_step: bool) -> Row | int:
    """Return the row of a mesh, or only the bytes of a rank that was looked at and does not fit.

    Raises:
        ShardvizError: The mesh is not planned.
    """
    # The last but one of each axis: its stage is empty if any stage is.
    stages = {axis: rank_along(job.mesh, axis, -2) for axis in loaded.stage_axes if job.mesh.axis_size(axis) > 2}
    rank_samples = [*stages.values(), *(job.mesh.ranks[:1] if memory and job.with_step else ())]
    if hasattr(loaded.module, "check_mesh"):
        loaded.module.check_mesh(job.mesh)
    looks = _quick_looks(job, loaded, rank_samples, most)
    for axis, rank in stages.items():
        if not looks[rank][1]:
            raise ShardvizError(f"stages of {axis} would have no parameters")
    lasting = max((lasting for lasting, _ in looks.values()), default=0)
    if memory and lasting > memory:
        return lasting
    return row_of(PlannedRanks(_planned(job, loaded, most, needs_step=needs_step), job.mesh))


def _quick_looks(job: PlanJob, loaded: Loaded, ranks: Sequence[int], most: int) -> dict[int, tuple[int, bool]]:
    """Return by rank the bytes that its GPU always holds, and whether it has parameters."""

    def look(rank: int) -> tuple[int, bool]:
        plan_part = answer(replace(job, with_step=False), loaded, rank).plan_part
        amounts = PlanBytes(PlannedRanks(PlanRecord(SCHEMA, (plan_part,)), job.mesh))
        has_parameters = any(
            plan_part.record.bodies[tensor.body].role == "param" for tensor in plan_part.record.tensors
        )
        return int(amounts.lasting[job.mesh.ranks.index(rank)]), has_parameters

    return ask(ranks, look, most)


def _too_large(job: PlanJob, loaded: Loaded, large: Sequence[Row], place: int) -> Iterator[Row]:
    """Yield the rows that do not fit, smallest first.

    A mesh is planned, without a step, if it may need less than those before it. Of the others the bytes are those of
    the rank that was looked at: their other ranks may have more.
    """
    least = math.inf
    for number, row in enumerate(sorted(large, key=lambda row: (row.bytes, row.place))):
        if row.bytes < least:
            try:
                record = _planned(replace(job, mesh=row.mesh, with_step=False), loaded)
                row = replace(row, bytes=int(PlanBytes(PlannedRanks(record, row.mesh)).lasting.max()))
                least = min(least, row.bytes)
            except ShardvizError as error:
                row = Row(row.mesh, failed=error.message)
        yield replace(row, place=place + number)
