"""One rank's tensors of a probe's model: the probe runs as that rank in a fake world."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardviz.dump.records.plan import BucketRecord, PlanPart, UnitRecord
from shardviz.errors import ShardvizError
from shardviz.live.capture.capture import Capture
from shardviz.live.capture.locals import Local, local_tensors, unwrapped
from shardviz.live.capture.pipeline_parts import PipelinePart
from shardviz.live.compat import (
    clean_name,
    ddp_buckets,
    fake_world,
    fsdp_units,
    is_compiled,
    meshes_joined_once,
    without_compiling,
)
from shardviz.live.plan.building import sharded, size_of, unsharded
from shardviz.live.plan.dry_step import planned_step
from shardviz.live.plan.optimizers import states, taken_apart
from shardviz.live.plan.reads import TRIED, Answers, places_read
from shardviz.live.step.step import gradients
from shardviz.live.world.torchrun import environment_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch import nn

    from shardviz.dump.records.plan import StepFails
    from shardviz.live.plan.building import Built, Means
    from shardviz.live.plan.dry_step import PlannedStep
    from shardviz.live.plan.planning import Loaded, PlanJob

ALL: tuple[Means, ...] = ("meta", "fakes", "values")
"""How a model is built, in the order in which it is tried."""

NO_VALUES = "the step reads {}, which a plan does not have: it does the same with {}{}"
COMPILED = "the step is planned without torch.compile: compiled code may keep less of a forward"


@dataclass(frozen=True)
class Reply:
    """What a rank has.

    Attributes:
        plan_part: Its record.
        how: What is to be known of how it was built and stepped, a sentence each.
        without_step: Why no step was planned; empty if one was, or none was asked for.
        was_asked_for_step: Whether it was asked for a step.
        optimizer: The optimizer whose state it has; empty for none.
        step_fails: Whether no step was planned because it fails, on real ranks too.
        reads: The axes along which the user's code reads where this rank is, and the lines that do.
    """

    plan_part: PlanPart
    how: tuple[str, ...] = ()
    without_step: str = ""
    was_asked_for_step: bool = True
    optimizer: str = ""
    step_fails: StepFails = "no"
    reads: Mapping[str, str] = field(default_factory=dict)


def answer(job: PlanJob, loaded: Loaded, rank: int) -> Reply:
    """Build and shard the model as a rank does, step it without values, and record it."""
    warnings.filterwarnings("ignore", module=r"(torch|shardviz)\.")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch._subclasses").setLevel(logging.CRITICAL)  # what it raises is in the reply
    with (
        contextlib.redirect_stdout(sys.stderr),
        environment_of(rank, job.mesh.size, job.per_node),
        fake_world(rank, job.mesh.size),
        without_compiling(),
        meshes_joined_once(),
    ):
        with places_read(job.mesh) as reads:
            probe, notes = loaded.again() if loaded.again is not None else (loaded.module, ())
            reply = _Rank(job, probe, loaded.early, rank).reply()
        return replace(reply, reads=reads, how=(*notes, *reply.how))


class _Rank:
    """One rank that is asked."""

    def __init__(self, job: PlanJob, probe: ModuleType, early: nn.Module | None, rank: int) -> None:
        self.job = job
        self.probe = probe
        self.rank = rank
        self.mesh = init_device_mesh("cpu", job.mesh.shape, mesh_dim_names=job.mesh.axes)
        self.stages = PipelinePart(tuple(getattr(probe, "STAGE_AXES", ())))
        self.capture = Capture(rank, job.mesh.size)
        self.early = early
        # What the model has before it is stepped: `_pre_dp_module_transform` exchanges parameters in a forward.
        self.before: list[Local] = []
        self.buckets: tuple[BucketRecord, ...] = ()
        self.size = size_of(early)

    def reply(self) -> Reply:
        """Return what this rank has."""
        built, step = self._built_and_stepped()
        self.capture.add_mesh(self.mesh)
        units = tuple(UnitRecord(*unit) for unit in fsdp_units(unwrapped(built.model)))
        buckets = self.buckets or _buckets(built.model)
        optimizer = self._record(built, step)
        if step.comms is not None:
            self.capture.collectives += step.comms.records(self.job.mesh, self.rank, with_ranks=True)
        self.capture.schedule += step.schedule
        plan_part = PlanPart(self.capture.record(), {}, units, buckets, step.saved, step.peak)
        is_stepped = step.comms is not None or step.failed
        compiled = (COMPILED,) if is_stepped and any(map(is_compiled, built.model.modules())) else ()
        how = (*built.refused, *step.notes, *compiled)
        return Reply(plan_part, how, step.failed, self.job.with_step, optimizer, step.fails)

    def _built_and_stepped(self) -> tuple[Built, PlannedStep]:
        """Build and step the model; if that fails from the meta device, try other means."""
        built = self._sharded()
        step = self._step(built)
        answered = self._step_with_answers(built.means) if step.reads_values else None
        if answered is not None:
            return answered
        if not step.failed or built.means != "meta":
            return built, step
        for means in ("fakes",) if step.reads_values else ALL[1:]:
            with contextlib.suppress(ShardvizError):
                sharded_model = self._sharded(means)
                again = self._step(sharded_model)
                if not again.failed:
                    again.notes += [f"planned with this rank's own values: {step.failed}"] if means == "values" else []
                    return sharded_model, again
                step = step if again.reads_values else again
        return self._sharded(), step  # a step that failed has left its model half done

    def _step_with_answers(self, means: Means) -> tuple[Built, PlannedStep] | None:
        """Step the model with several answers for numbers read; None if the step depends on them.

        An answer on which the user's code raises, as on a loss that is infinite, is none that a job goes on with.
        """
        stepped: list[tuple[Built, PlannedStep]] = []
        same: list[Answers] = []
        ended = ""
        for answers in (Answers(*pair) for pair in TRIED):
            built = self._sharded(means)
            step = self._step(built, answers)
            if step.reads_values or not answers.lines:
                return None
            if step.failed:
                ended += f"; with {answers.tried} {step.failed}"
                continue
            stepped.append((built, step))
            if self._outcome(built, step) != self._outcome(*stepped[0]):
                return None
            same.append(answers)
        if len(same) < 2:
            return None
        tried = ", ".join(answers.tried for answers in same)
        stepped[0][1].notes.append(NO_VALUES.format(same[0].reads, tried, ended))
        return stepped[0]

    def _outcome(self, built: Built, step: PlannedStep) -> object:
        """Return what a step has sent and held, and which parameters have a gradient after it."""
        assert step.comms is not None
        sent = step.comms.records(self.job.mesh, self.rank, with_ranks=True)
        with_gradients = {name for name, param in built.model.named_parameters() if param.grad is not None}
        return sent, step.schedule, step.saved, step.peak, with_gradients

    def _sharded(self, *means: Means) -> Built:
        def build() -> nn.Module:
            return unsharded(self.probe, self.job.probe.build, double=self.job.double)

        early, self.early = self.early, None  # sharding changes it
        built = sharded(build, self.probe.parallelize, self.mesh, means or ALL, self.size, early)
        self.before = [_without_values(local) for local in self._locals(built.model)]
        self.buckets = _buckets(built.model)
        self.capture.add_ties(built.model)
        return built

    def _step(self, built: Built, answers: Answers | None = None) -> PlannedStep:
        return planned_step(self.job, self.probe, built, self.mesh, answers)

    def _record(self, built: Built, step: PlannedStep) -> str:
        """Record the model and what a step leaves behind; return the optimizer's name."""
        for local in self.before:
            self.capture.add_values(local, "initial")
        is_left = step.comms is not None and not step.clears
        grads = gradients(self._locals(built.model)) if is_left else _expected(built.model, self.before)
        states_kept, optimizer = states(self.job, self.probe, built, self.mesh, self.before, grads, step)
        for local in [*grads, *states_kept]:
            self.capture.add_values(_without_values(local), "step")
        return optimizer

    def _locals(self, model: nn.Module) -> list[Local]:
        inner = unwrapped(model)
        named = (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False))
        tensors = {clean_name(name): tensor for name, tensor in named}
        return self.stages.own(taken_apart(local_tensors(inner, self.job.mesh), tensors))


def _buckets(model: nn.Module) -> tuple[BucketRecord, ...]:
    return tuple(BucketRecord(size, views) for size, views in ddp_buckets(model))


def _expected(model: nn.Module, locals_: list[Local]) -> list[Local]:
    """Return gradients as a step leaves them if nothing is special: each as its parameter."""
    params = {clean_name(name): param for name, param in unwrapped(model).named_parameters()}
    without = {name for name, param in params.items() if not param.requires_grad}
    without |= {local.name for local in locals_ if local.name.rpartition(".")[0] in params}  # scales of narrow weights
    return [replace(local, role="grad") for local in locals_ if local.role == "param" and local.name not in without]


def _without_values(local: Local) -> Local:
    """Return a tensor that has only a shape and an element type."""
    values = torch.empty(local.values.shape, dtype=local.values.dtype, device="meta")
    return replace(local, values=values, grad=None)
