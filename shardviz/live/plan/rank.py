"""One rank of a plan: a probe's model, built and sharded with as few values as it takes.

The probe runs as that rank in a fake world.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
import warnings
from dataclasses import dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.dump.records.files import BucketRecord, PlanPart, StepFails, UnitRecord
from shardviz.errors import ProbeError, ShardvizError
from shardviz.live.capture.capture import Capture
from shardviz.live.capture.pipeline_parts import PipelinePart
from shardviz.live.claims.registry import local_tensors, unwrapped
from shardviz.live.compat.ddp import ddp_buckets, has_ddp
from shardviz.live.compat.fakes import fake_mode, fakes_converted
from shardviz.live.compat.fsdp import fsdp_units, parameters_are_held
from shardviz.live.compat.meshes import meshes_joined_once
from shardviz.live.compat.modules import clean_name, followed, is_compiled, replaced
from shardviz.live.compat.worlds import fake_world, split_alike
from shardviz.live.plan.dry_step import PlannedStep, planned_step
from shardviz.live.plan.forks import is_own, one_line
from shardviz.live.plan.optimizers import states, taken_apart
from shardviz.live.plan.reads import TRIED, Answers, places_read, variables_read
from shardviz.live.probe import as_module, built_model
from shardviz.live.step.step import gradients
from shardviz.live.world.torchrun import environment_of
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from shardviz.live.claims.local import Local
    from shardviz.live.plan.planning import Loaded, PlanJob


Means = Literal["meta", "fakes", "values"]
"""On what a model is built: the meta device, tensors without memory that say they are on a device, or real ones."""

MAX_VALUES = 1 << 28
"""Bytes of a model that may be built with its values."""

AT_FAULT = "make what it calls work on the meta device"
BY_HAND = "call build() and parallelize() by hand: the traceback shows where"
NO_GPU = "a plan has no GPU: leave out what asks for one, and take the device from mesh.device_type"
FOR_FSDP1 = "a plan has no GPU: give FullyShardedDataParallel device_id=torch.device(mesh.device_type)"
ONE_GROUP = "the ranks are there before parallelize() is called: leave out init_process_group, and take their mesh"
TALKS = (
    "parallelize() calls {}: a plan sends nothing, so what it returns is not true, nor are layouts that depend on it"
)

INSTEAD = {
    "fakes": "so the model is built on tensors without memory, under FakeTensorMode",
    "values": "so the model is built with its values",
}
"""What a plan says after the reasons for which a model is not built on the meta device."""

ON = {"meta": "on the meta device", "fakes": "under FakeTensorMode", "values": "with values"}
"""How a plan names each means."""


@dataclass(frozen=True)
class Built:
    """A model that was built and sharded.

    Attributes:
        means: How.
        mode: The mode in which its tensors live; None unless they are fakes.
        refused: Why no means with less memory worked, and what is not true of this one, a line each.
    """

    model: nn.Module
    means: Means
    mode: Any = None
    refused: tuple[str, ...] = ()


def unsharded(job: PlanJob, probe: ModuleType) -> nn.Module:
    """Build a probe's model."""
    model = built_model(probe, job.probe.build)
    return model.double() if job.double else model


def early_model(job: PlanJob, probe: ModuleType) -> nn.Module | None:
    """Build a model on the meta device before there are any ranks, once for all of them.

    Returns:
        None if it cannot be built there, or asks for a rank, and may not be the same on all.
    """
    checks: list[bool] = []
    with (
        followed(distributed, "is_initialized", lambda: checks.append(True)),
        variables_read() as read,
        contextlib.suppress(Exception),
        torch.device("meta"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the exception names what is wrong
        model = unsharded(job, probe)
        return None if checks or read else model
    return None


class _Limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends what makes too many new tensors for a plan, before the machine's memory does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if torch.is_tensor(returned) and not any(map(torch.is_tensor, args)):
            self.made += returned.numel() * returned.element_size()
            if self.made > MAX_VALUES:
                most = bytes_text(MAX_VALUES)
                raise ProbeError(f"with values it needs more than the {most} that a plan may use", AT_FAULT)
        return returned


class _UserCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes collectives that user code calls: here they send nothing and return no true values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "c10d" and "barrier" not in str(func):
            frames = list(traceback.extract_stack())
            first = next((at for at, frame in enumerate(frames) if frame.filename.endswith("distributed_c10d.py")), 0)
            callers = [frame for frame in frames[:first] if not frame.filename.endswith("c10d_logger.py")]
            if callers and is_own(callers[-1].filename):
                caller = callers[-1]
                line = f"({Path(caller.filename).name}, line {caller.lineno}: {caller.line})"
                self.calls[TALKS.format(f"{frames[first].name} {line}")] = None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """Refuse a process group while a probe is imported: it would wait for absent ranks."""
    before: Any = distributed.init_process_group
    is_imported = False

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not is_imported:
            raise ProbeError("init_process_group() is called while the probe is imported", ONE_GROUP)
        before(*args, **kwargs)  # the probe keeps this function where it imports it by name

    with replaced(distributed, "init_process_group", init_process_group):
        yield
    is_imported = True


def _hint(why: str) -> str:
    """Return what to do if a model cannot be built by any means."""
    if "needs a non-CPU accelerator" in why:
        return FOR_FSDP1
    if "default process group twice" in why:
        return ONE_GROUP
    return NO_GPU if any(word in why.lower() for word in ("cuda", "nccl")) else BY_HAND


ALL: tuple[Means, ...] = get_args(Means)
"""How a model is built, in the order in which it is tried."""

NO_VALUES = "the step reads {}, which a plan does not have: it does the same with {}{}"
COMPILED = "the step is planned without torch.compile: compiled code may keep less of a forward"


@dataclass(frozen=True)
class Reply:
    """What a rank has.

    Attributes:
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
        torch.compiler.set_stance("force_eager"),  # without values nothing compiles
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
        tensors = () if early is None else (*early.parameters(), *early.buffers())
        self.size = sum(tensor.nbytes for tensor in tensors)

    def reply(self) -> Reply:
        """Return what this rank has."""
        built, step = self._built_and_stepped()
        self.capture.add_mesh(self.mesh)
        units = tuple(starmap(UnitRecord, fsdp_units(unwrapped(built.model))))
        buckets = self.buckets or tuple(starmap(BucketRecord, ddp_buckets(built.model)))
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

    def _built(self, means: Sequence[Means]) -> Built:
        """Build and shard the model by the first means that works.

        Raises:
            ProbeError: No means works.
        """
        early, self.early = self.early, None  # sharding changes it
        refused: list[str] = []
        reasons: list[str] = []
        talks = _UserCollectives()
        for kind in means:
            if kind == "values" and self.size > MAX_VALUES:
                needed, most = bytes_text(self.size), bytes_text(MAX_VALUES)
                limit = f"with values it needs {needed}, more than the {most} that a plan may use"
                told = reasons[:1] if len(set(reasons)) < len(reasons) else refused
                raise ProbeError("; ".join((*told, limit)), AT_FAULT)
            mode: Any = {"meta": contextlib.nullcontext, "fakes": fake_mode, "values": _Limit}[kind]()
            call, talks = "build()", _UserCollectives()
            try:
                with mode, fakes_converted(mode) if kind == "fakes" else contextlib.nullcontext():
                    with torch.device("meta") if kind == "meta" else contextlib.nullcontext():
                        model = early if kind == "meta" else None
                        if model is None:
                            model = unsharded(self.job, self.probe)
                    call = "parallelize()"
                    with talks, split_alike():  # what `parallelize` makes for itself has values
                        returned = self.probe.parallelize(model, self.mesh)
                    if returned is not None:
                        model = as_module(returned, call, "return the model, or None")
            except ProbeError as error:
                raise ProbeError("; ".join((*refused, error.message)), error.hint) from error
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # torch's CheckpointException is not derived from Exception
                reasons.append(f"{call} raised {one_line(error)}")
                refused.append(f"{call} {ON[kind]} raised {one_line(error)}")
                continue
            if kind == "meta" and (has_ddp(model) or parameters_are_held(model)):
                continue  # a step needs others, which are on a device
            instead = (INSTEAD[kind],) if refused else ()
            return Built(model, kind, mode if kind == "fakes" else None, (*refused, *instead, *talks.calls))
        why = reasons[-1] if len(set(reasons)) == 1 else refused[-1]
        raise ProbeError("; ".join((why, *talks.calls)), _hint(why))

    def _sharded(self, *means: Means) -> Built:
        built = self._built(means or ALL)
        self.before = [_without_values(local) for local in self._locals(built.model)]
        self.buckets = tuple(starmap(BucketRecord, ddp_buckets(built.model)))
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
        return self.stages.of_stage(taken_apart(local_tensors(inner, self.job.mesh), tensors))


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
