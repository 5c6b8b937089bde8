"""A whole plan: a probe's model on a mesh that nobody has, written as a dump."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RunRecord
from shardviz.dump.records.tensors import MeshRecord
from shardviz.errors import ProbeError, ShardvizError
from shardviz.live.capture.intended import check_intended
from shardviz.live.plan.asked import Question, answer
from shardviz.live.plan.building import EarlyModel, unsharded
from shardviz.live.plan.choosing import choose
from shardviz.live.plan.forks import ask, one_line
from shardviz.live.plan.optimizers import Optimizer, dtype_of
from shardviz.live.probe import load_probe
from shardviz.plan.records import PlanRecord
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from shardviz.layout.mesh import Mesh
    from shardviz.live.plan.asked import Reply
    from shardviz.live.plan.choosing import Chosen
    from shardviz.probe_files import Probe


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


def plan(job: PlanJob) -> tuple[RunRecord, PlanRecord]:
    """Plan a job, and return the two files of its dump.

    Raises:
        ShardvizError: The model cannot be built or sharded without ranks, or too many ranks differ.
    """
    _check_dtypes(job)
    module = _loaded(job.probe)
    expect = getattr(module, "expect", {})
    check_intended(expect)
    if hasattr(module, "check_mesh"):
        module.check_mesh(job.mesh)
    early = EarlyModel(lambda: unsharded(module, job.probe.build, double=job.double))
    question = Question(module, job.probe.build, job.mesh, job.optimizer, early, job.batch, job.with_step, job.double)

    def asked(ranks: Sequence[int], with_step: bool) -> dict[int, Reply]:
        one = replace(question, with_step=with_step and job.with_step)
        return ask(ranks, lambda rank: answer(one, rank))

    chosen = choose(job.mesh, asked, tuple(getattr(module, "STAGE_AXES", ())))
    run_id = secrets.token_hex(8)
    run = RunRecord(
        schema=SCHEMA,
        shardviz=version("shardviz"),
        torch=version("torch"),
        num_ranks=job.mesh.size,
        command=job.command,
        probe=job.probe.name,
        mesh=MeshRecord(job.mesh.axes, job.mesh.shape, job.mesh.ranks),
        intended=dict(expect),
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
    stands = f"{counted(chosen.asked, 'rank')} of {job.mesh.size:,} asked"
    apart = f"; the code tells ranks apart along {', '.join(chosen.axes)}" if chosen.axes else ""
    notes = dict.fromkeys(line for reply, _ in chosen.parts for line in reply.how)
    failed = next((reply.without_step for reply, _ in chosen.parts if reply.without_step), "")
    if not job.with_step:
        failed = "--no-step was given"
    of = next((reply.optimizer for reply, _ in chosen.parts if reply.optimizer), "")
    return PlanRecord(SCHEMA, parts, run_id, job.node, of, (stands + apart, *notes), failed)
