"""A planned model's step on tensors without values: collectives, schedule, kept memory."""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records.files import PeakRecord, SavedRecord, StepFails
from shardviz.errors import ProbeError, ShardvizError
from shardviz.live.claims.registry import unwrapped
from shardviz.live.compat.ddp import ddp_alone, is_made_in_first_step, looks_for_unused, only_in_first_step
from shardviz.live.compat.fakes import fake_mode, futures_answered
from shardviz.live.compat.fsdp import flat_params_without_memory, held_back, without_pinned_memory
from shardviz.live.compat.meshes import quiet_redistribution
from shardviz.live.compat.modules import followed
from shardviz.live.compat.pipelines import pipelines_alone
from shardviz.live.compat.tensors import real_tensors
from shardviz.live.plan.choices import OF_VALUES, Choices
from shardviz.live.plan.forks import one_line, where
from shardviz.live.plan.memory import Watched
from shardviz.live.plan.optimizers import dtype_of
from shardviz.live.plan.reads import Answers, NoOperator, Refusal
from shardviz.live.step.batch import Batch, as_written, batch_axes, own_batch, whole_batch, whole_parts
from shardviz.live.step.observe import observed
from shardviz.live.step.running import tensors_in
from shardviz.live.step.step import loss_of, stages_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.step import StageRecord
    from shardviz.live.plan.planning import PlanJob
    from shardviz.live.plan.rank import Built
    from shardviz.live.step.comms import Comms

EVENLY = "the step reads what {} chose: the plan counts every choice equally often, on every rank"
LAZY = (
    "the first step also compares and broadcasts the parameters, not counted: in it replicate() makes a "
    "DistributedDataParallel"
)
NO_GRADIENTS = "the step leaves no gradients, so there is no optimizer state: call loss.backward() in step()"
ON_CPU = "what save_on_cpu() keeps in the CPU's memory is counted as activations, as if it stayed on the GPU"
STATIC = (
    "the first step reduces {:,} bytes more, not counted: which parameters were used, for DistributedDataParallel with "
    "static_graph=True"
)
UNUSED = "find_unused_parameters=True, which reads from a tensor which parameters the step has used"


@dataclass
class PlannedStep:
    """What a step of one rank did.

    Attributes:
        failed: Why it failed; empty if it did not, or none was asked for.
        reads_values: Whether made-up values would not help: the model does what its values say, or the probe is wrong.
        comms: What it would have sent, as it was seen; None if there was no step.
        schedule: The passes of its stages.
        saved: What its forward keeps for its backward, by module.
        peak: The moment at which it holds most; None if there was no step.
        without_values: The mode in which its tensors live.
        notes: What could not be had.
        clears: Whether it has cleared its gradients when it ends, as after an optimizer's step.
        fails: Whether it would fail on real ranks, too.
    """

    failed: str = ""
    reads_values: bool = False
    comms: Comms | None = None
    schedule: tuple[StageRecord, ...] = ()
    saved: tuple[SavedRecord, ...] = ()
    peak: PeakRecord | None = None
    without_values: Any = field(default_factory=contextlib.nullcontext)
    notes: list[str] = field(default_factory=list)
    clears: bool = False
    fails: StepFails = "no"


def planned_step(
    job: PlanJob, probe: ModuleType, built: Built, device_mesh: DeviceMesh, answers: Answers | None = None
) -> PlannedStep:
    """Step a sharded model on tensors without values, if a step is planned and there is a batch.

    A model on the meta device gets tensors that say they are on a CPU. Code that reads a number gets one of the
    answers; without them the step ends there.
    """
    if not job.with_step or (job.batch is None and not hasattr(probe, "batch")):
        return PlannedStep()
    mode = contextlib.nullcontext() if built.means == "values" else built.mode or fake_mode()
    try:
        with mode, _silence():
            without_pinned_memory(built.model)
            if built.means == "meta":
                built.model.to_empty(device="cpu")
            with answers or contextlib.nullcontext():
                return _run_step(job, probe, built, device_mesh, mode)
    except ShardvizError as error:
        hint = f": {error.hint}" if error.hint else ""
        fails: StepFails = "yes" if isinstance(error, ProbeError) else "no"
        return PlannedStep(error.message + hint, reads_values=True, fails=fails)  # by other means it is no better
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is not derived from Exception
        return _failed(built, error)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Print and log nothing: torch logs a traceback for each operator that fails without values."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _failed(built: Built, error: BaseException) -> PlannedStep:
    how = "with values" if built.means == "values" else "without values"
    if type(error).__name__ in OF_VALUES:
        reads = f"the step reads a value, and a plan has none{where(error)}"
        unused = f"a step {how} cannot run in DistributedDataParallel with {UNUSED}"
        return PlannedStep(unused if looks_for_unused(built.model) else reads, reads_values=True)
    why = ": a plan has no GPU" if "cuda" in str(error).lower() else ""
    fails: StepFails = "no" if why else "yes" if built.means == "values" else "perhaps"
    return PlannedStep(f"a step run {how} raised {one_line(error)}{why}", fails=fails)


def _run_step(job: PlanJob, probe: ModuleType, built: Built, device_mesh: DeviceMesh, mode: Any) -> PlannedStep:
    model = built.model
    axes = batch_axes(probe, job.mesh)
    batch = own_batch(_whole(job, probe, axes), axes, device_mesh)
    with real_tensors():
        stages = stages_of(probe, model, device_mesh)
    torch.manual_seed(2)
    buckets = ddp_alone(model)
    has_values = built.means == "values"
    choices = None if has_values else Choices()
    saved_on_cpu: list[bool] = []
    with (
        Refusal() if has_values else contextlib.nullcontext(),  # type: ignore[no-untyped-call]
        NoOperator(has_values=has_values),
        quiet_redistribution(),
        pipelines_alone(),
        flat_params_without_memory(),
        futures_answered(),
        torch.backends.mkldnn.flags(enabled=False),  # how much its LSTM keeps for backward only oneDNN knows
        followed(torch.autograd.graph.save_on_cpu, "__init__", lambda *_, **__: saved_on_cpu.append(True)),
        observed(model, stages, values=False) as observation,
        Watched(
            unwrapped(model), stages.values() or [unwrapped(model)], observation.comms, buckets, choices
        ) as watched,
    ):
        if hasattr(probe, "step"):
            probe.step(model, as_written(batch), device_mesh)
        else:
            torch.autograd.backward(loss_of(probe, model, batch))
    leaves_none = _leaves_none(model)
    clears = leaves_none and any(made.in_backward for made, _ in filter(None, watched.log.events))
    notes = [EVENLY.format(call) for call in getattr(choices, "read", ())]
    notes += [ON_CPU] if saved_on_cpu else []
    notes += [STATIC.format(once)] if (once := only_in_first_step(model)) else []
    notes += [LAZY] if is_made_in_first_step(model) else []
    notes += [NO_GRADIENTS] if leaves_none and not clears else []
    return PlannedStep(
        comms=observation.comms,
        schedule=tuple(observation.schedule),
        saved=tuple(SavedRecord(name, size) for name, size in watched.log.kept().items() if size),
        peak=watched.log.peak(),
        without_values=mode,
        notes=notes,
        clears=clears,
    )


def _whole(job: PlanJob, probe: ModuleType, axes: Mapping[str, int]) -> Batch:
    """Return the batch of all ranks; its dtype defaults to the probe's own batch's, or float32."""
    if job.batch is None:
        return whole_batch(probe, axes, job.mesh, double=job.double)
    sizes, name = job.batch
    batch_tensors = tensors_in(probe.batch()) if not name and hasattr(probe, "batch") else ()
    dtype = dtype_of(name) if name else next((tensor.dtype for tensor in batch_tensors), torch.float32)
    return whole_parts((torch.zeros(sizes, dtype=dtype),), axes, job.mesh)


def _leaves_none(model: nn.Module) -> bool:
    """Whether a step has left no gradients, of parameters that could have some."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_some = any(parameter.grad is not None for parameter in trained) or any(
        True for _ in held_back(unwrapped(model))
    )
    return bool(trained) and not has_some
