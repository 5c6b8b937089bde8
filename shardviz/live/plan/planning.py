"""A whole plan: a probe's model on a mesh that nobody has, written as a dump."""

from __future__ import annotations

import contextlib
import secrets
import sys
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RunRecord
from shardviz.dump.records.plan import PlanRecord
from shardviz.dump.records.tensors import MeshRecord
from shardviz.errors import ProbeError, ShardvizError
from shardviz.live.capture.intended import check_intended
from shardviz.live.plan.asked import Question, answer
from shardviz.live.plan.asking import Request, alone
from shardviz.live.plan.building import EarlyModel, unsharded, without_groups
from shardviz.live.plan.choosing import choose
from shardviz.live.plan.forks import is_own, one_line
from shardviz.live.plan.optimizers import Optimizer, dtype_of
from shardviz.live.plan.reads import variables_read
from shardviz.live.probe import load_probe
from shardviz.live.world.torchrun import environment_of, variables
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from shardviz.layout.mesh import Mesh
    from shardviz.live.plan.asked import Again, Reply
    from shardviz.live.plan.asking import Program
    from shardviz.live.plan.choosing import Chosen
    from shardviz.probe_files import Probe

ONLY_ONCE = "the probe cannot be imported twice, so all ranks have what rank 0 reads while it is imported: {}"


@dataclass(frozen=True)
class PlanJob:
    """What is planned.

    Attributes:
        probe: The probe.
        mesh: The mesh.
        node: GPUs of a node; 0 where it is not given.
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


@dataclass(frozen=True)
class Loaded:
    """A probe, with its model: the same for plans on all meshes.

    Attributes:
        module: The probe's module.
        early: The model, built before there were ranks.
        again: Imports the module again, on a rank, and says what is not true of it; None where it is the same on all.
    """

    module: ModuleType
    early: EarlyModel
    again: Again | None = None

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different layers."""
        return tuple(getattr(self.module, "STAGE_AXES", ()))


def load(job: PlanJob) -> Loaded:
    """Import a job's probe and build its model.

    Raises:
        ShardvizError: The probe cannot be imported, or what was asked for does not exist.
    """
    _check_dtypes(job)
    with contextlib.redirect_stdout(sys.stderr):  # what a probe prints is not data
        module, again = _loaded_as_first(job)
        check_intended(getattr(module, "expect", {}))
        early = EarlyModel(lambda: unsharded(module, job.probe.build, double=job.double), is_same=again is None)
        return Loaded(module, early, again)


def question_of(job: PlanJob, loaded: Loaded) -> Question:
    """Return what is asked of the ranks of a job's mesh.

    Raises:
        ShardvizError: The probe refuses this mesh.
    """
    if hasattr(loaded.module, "check_mesh"):
        loaded.module.check_mesh(job.mesh)
    return Question(
        loaded.module,
        job.probe.build,
        job.mesh,
        job.optimizer,
        loaded.early,
        job.batch,
        job.with_step,
        job.double,
        job.node,
        loaded.again,
    )


def plan(job: PlanJob) -> tuple[RunRecord, PlanRecord]:
    """Plan a job, and return the two files of its dump.

    Raises:
        ShardvizError: The model cannot be built or sharded without ranks, or too many ranks differ.
    """
    return alone(planned(job, load(job)))


def planned(job: PlanJob, loaded: Loaded) -> Program[tuple[RunRecord, PlanRecord]]:
    """Ask ranks, and return the two files of a job's dump.

    Raises:
        ShardvizError: The model cannot be built or sharded without ranks, or too many ranks differ.
    """
    question = question_of(job, loaded)

    def ask(ranks: Sequence[int], with_step: bool) -> Program[dict[int, Reply]]:
        one = replace(question, with_step=with_step and job.with_step)
        return (yield Request(ranks, lambda rank: answer(one, rank)))

    chosen = yield from choose(job.mesh, ask, loaded.stage_axes)
    run_id = secrets.token_hex(8)
    run = RunRecord(
        schema=SCHEMA,
        shardviz=version("shardviz"),
        torch=version("torch"),
        num_ranks=job.mesh.size,
        command=job.command,
        probe=job.probe.name,
        mesh=MeshRecord(job.mesh.axes, job.mesh.shape, job.mesh.ranks),
        intended=dict(getattr(loaded.module, "expect", {})),
        run_id=run_id,
    )
    return run, _record(job, chosen, run_id)


def _check_dtypes(job: PlanJob) -> None:
    """Make sure that torch has the element types that were asked for.

    Raises:
        ShardvizError: It has not.
    """
    for name in (job.optimizer.dtype, job.batch[1] if job.batch else ""):
        if name:
            dtype_of(name)


def _loaded_as_first(job: PlanJob) -> tuple[ModuleType, Again | None]:
    """Import a probe as the first rank does, and return how the others do if it reads which rank it is.

    Raises:
        ProbeError: It raises something while it is imported, or lacks a function.
    """
    before = set(sys.modules)
    size, node = job.mesh.size, job.node or job.mesh.size
    with environment_of(0, size, node), variables_read() as read, without_groups():
        module = _loaded(job.probe)
    of_ranks = [variables(rank, size, node) for rank in (0, min(1, size - 1), size - 1)]
    differs = any(len({one[name] for one in of_ranks}) > 1 for name in read)
    files = {name: getattr(sys.modules[name], "__file__", None) or "<" for name in set(sys.modules) - before}
    own = [name for name, file in files.items() if is_own(file) and "site-packages" not in Path(file).parts]
    return module, _imports(job, module, own) if differs else None


def _imports(job: PlanJob, module: ModuleType, own: Sequence[str]) -> Again:
    """Return how a rank imports a probe again, with the modules of its own."""
    modules = {name: sys.modules[name] for name in own}

    def once() -> ModuleType:
        for name in own:
            sys.modules.pop(name, None)
        return _loaded(job.probe)

    def again() -> tuple[ModuleType, tuple[str, ...]]:
        try:
            return once(), ()
        except ProbeError as error:
            with environment_of(0, job.mesh.size, job.node or job.mesh.size):
                if not _raises(once):  # it is this rank that cannot import it
                    raise
            sys.modules.update(modules)
            return module, (ONLY_ONCE.format(error.message),)

    return again


def _raises(work: Callable[[], object]) -> bool:
    try:
        work()
    except ProbeError:
        return True
    return False


def _loaded(probe: Probe) -> ModuleType:
    """Import a probe.

    Raises:
        ProbeError: It raises something while it is imported, or lacks a function.
    """
    try:
        return load_probe(probe.path, probe.build, probe.module)
    except ShardvizError:
        raise
    except (Exception, SystemExit) as error:
        raised = f"importing {probe.name} raised {one_line(error)}"
        raise ProbeError(raised, f"python {probe.path} shows where") from error


def _record(job: PlanJob, chosen: Chosen, run_id: str) -> PlanRecord:
    parts = tuple(
        structs.replace(reply.part, at=at, record=structs.replace(reply.part.record, run_id=run_id, hostname=""))
        for reply, at in chosen.parts
    )
    stands = f"{counted(chosen.num_asked, 'rank')} of {job.mesh.size:,} asked"
    apart = f"; the code tells ranks apart along {', '.join(chosen.axes)}" if chosen.axes else ""
    notes = dict.fromkeys([*(line for reply, _ in chosen.parts for line in reply.how), *chosen.notes])
    failed = chosen.failed if job.with_step else "--no-step was given"
    of = next((reply.optimizer for reply, _ in chosen.parts if reply.optimizer), "")
    how = (stands + apart, *notes)
    return PlanRecord(SCHEMA, parts, run_id, job.node, of, how, failed, chosen.step_fails)
