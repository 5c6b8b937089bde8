"""One training step of a probe, sharded on every rank and unsharded for comparison.

A probe that has a `batch()` is stepped. Both steps start from the same weights, in float64, so that a difference is not
rounding. A probe may define:

    batch()                    the whole batch: a tensor, or a tuple or dict of the model's arguments
    BATCH_AXES                 the mesh axes over which the batch's dim 0 is split, or a dictionary from axes to dims:
                               {"dp": 0, "cp": 1}; default: every rank sees all of it
    loss(model, batch)         the mean loss of the batch; default: the mean square of the model's output
    step(model, batch, mesh)   one sharded step, backward included; default: `loss` and its backward
    optimizer(model, mesh)     the optimizer to step and check afterwards; default: Adam, only its state checked
    stages(model, mesh)        this rank's stages of a pipeline, by number; their runs are recorded
    STAGE_AXES                 the mesh axes along which ranks have different layers; the last stage has the output
    whole_output(part, mesh)   the output of all ranks in the batch's order, if no placements describe this rank's part
    collective_calls(model, mesh)
                               modules that call one collective each, to compare with its definition: by name, the
                               collective and the ranks of its group; a submodule `before` returns its input
    log(model, batch, loss)    the values that the training loop would print after the step, by name; or one number
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardviz.dump.records.step import CallRecord
from shardviz.errors import ProbeError
from shardviz.layout.placements import Partial, Placement, Replicate, Shard
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.claims.local import Local
from shardviz.live.claims.registry import of_tensor, unwrapped
from shardviz.live.compat.fsdp import dividing_float64_once
from shardviz.live.compat.meshes import norms_reduced_first
from shardviz.live.compat.modules import clean_name
from shardviz.live.step.batch import Batch, as_written, num_parts
from shardviz.live.step.observe import Observed, observed
from shardviz.live.step.output_parts import output_dims
from shardviz.live.step.running import tensors_in
from shardviz.live.trace_modules import NONE, Followed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh
    from shardviz.live.step.return_values import Returned


Stages = Mapping[int, "nn.Module"]

STAGES = "return this rank's stages, as a dict of modules by their numbers in the whole pipeline, from 0 on"
"""What a probe's `stages()` has to return."""


@dataclass
class StepResult:
    """The result of one step.

    Attributes:
        output: The model's output in its last forward; None if it is not a tensor.
        logged: The values that `log` returned.
        observation: The record of the step while it ran.
        runs: How often the model ran for that output; micro-batches that make up the batch are one run.
        sizes: The shape of the first tensor of the batch that it ran on, which shows where an output has its dims.
        clips: The calls by which it clipped its gradients.
        returned: All that the model returned, call by call; empty if the output is not this rank's.
    """

    loss: torch.Tensor
    output: torch.Tensor | None
    logged: Mapping[str, torch.Tensor]
    observation: Observed
    runs: int = 1
    sizes: tuple[int, ...] = ()
    clips: tuple[Clip, ...] = ()
    returned: tuple[Returned, ...] = ()


def stages_of(probe: ModuleType, model: nn.Module, mesh: DeviceMesh) -> Stages:
    """Return this rank's stages of a pipeline by number; empty for a probe that does not name them.

    Raises:
        ProbeError: `stages()` returned something else.
    """
    stages = probe.stages(model, mesh) if hasattr(probe, "stages") else {}
    if not isinstance(stages, Mapping) or not all(isinstance(one, int) for one in stages):
        raise ProbeError(f"stages() returned {type(stages).__name__}", STAGES)
    return stages


def has_last_stage(probe: ModuleType, stages: Stages, mesh: DeviceMesh) -> bool:
    """Whether this rank has the output: the stage of the highest number, or the last place. Every rank calls this."""
    axes = getattr(probe, "STAGE_AXES", ())
    last_here = max(stages, default=-1)
    last = max(of_all_ranks(last_here)) if axes else last_here
    if last >= 0:
        return last_here == last
    return all(mesh.get_local_rank(axis) == mesh[axis].size() - 1 for axis in axes)


def sharded_step(
    probe: ModuleType,
    model: nn.Module,
    batch: Batch,
    mesh: DeviceMesh,
    stages: Stages | None = None,
    *,
    has_output: bool = True,
    seed: int = 2,
    followed: Followed = NONE,
) -> StepResult:
    """Step the sharded model on this rank's part of the batch.

    Args:
        batch: This rank's part of the batch.
        has_output: Whether the model's output is this rank's: in a pipeline the last stage has it.
    """
    torch.manual_seed(seed)
    observing, clipping = observed(model, stages, followed), noted_clips(model, probe)
    with sharded_again(model):
        with dividing_float64_once(), observing as observation, clipping as clips:
            if hasattr(probe, "step"):
                loss = _loss(probe.step(model, as_written(batch), mesh), "step")
            else:
                loss = loss_of(probe, model, batch)
                torch.autograd.backward(loss)
        logged = logged_by(probe, model, batch, loss)
    sizes = sizes_of(batch)
    output, runs = _output(observation, sizes, is_pipeline=hasattr(probe, "STAGE_AXES"))
    output = output if has_output else None
    if output is not None and hasattr(probe, "whole_output"):
        output = probe.whole_output(output, mesh)
    returned = tuple(observation.returned) if has_output else ()
    return StepResult(loss.detach(), output, logged, observation, runs, sizes, clips.of_step(), returned)


def calls(probe: ModuleType, model: nn.Module, mesh: DeviceMesh) -> list[CallRecord]:
    """Return the collectives to compare with their definition."""
    named = probe.collective_calls(unwrapped(model), mesh) if hasattr(probe, "collective_calls") else {}
    return [CallRecord(module, op, tuple(ranks)) for module, (op, ranks) in named.items()]


def sizes_of(batch: Batch) -> tuple[int, ...]:
    """Return the shape of a batch's first tensor, whose rows are those of the batch; empty if it has none."""
    return next((tuple(tensor.shape) for tensor in tensors_in(batch) if tensor.ndim), ())


def are_in_turn(outputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Whether a model that ran several times returned the rows of a batch, some of them each time."""
    return len(outputs) > 1 and len(outputs[-1]) != sum(map(len, outputs)) == (sizes[0] if sizes else 0)


def _output(observation: Observed, sizes: Sequence[int], *, is_pipeline: bool) -> tuple[torch.Tensor | None, int]:
    """Return the model's last output, joined if it ran on micro-batches one after the other, and its runs."""
    outputs = [output for output in observation.outputs if output.ndim]
    if not outputs:
        return None, 0
    if is_pipeline or are_in_turn(outputs, sizes):
        return torch.cat(outputs), 1
    return outputs[-1], len(outputs)


@contextmanager
def sharded_again(model: nn.Module) -> Iterator[None]:
    """Shard again what FSDP2 gathers in the context: after a forward alone its outermost module keeps weights whole."""
    before = [*model.parameters()]
    yield
    if [*map(id, model.parameters())] != [*map(id, before)]:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def logged_by(probe: ModuleType, model: nn.Module, batch: Batch, loss: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the values that the training loop would print, by name; a single number is named `log`."""
    logged = probe.log(model, as_written(batch), loss) if hasattr(probe, "log") else {}
    return dict(_values_in(logged if isinstance(logged, Mapping) else {"log": logged}))


def _values_in(logged: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield logged values by name, those of dicts within dicts by both names; a None is not a value.

    Raises:
        ProbeError: A value is neither a tensor nor made of numbers.
    """
    for key, value in logged.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _values_in(value, f"{name}.")
        elif torch.is_tensor(value):
            yield name, value
        elif value is not None:
            try:
                yield name, torch.tensor(value, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError) as error:
                problem = f"log() returned a value of class {type(value).__name__} under {name!r}"
                raise ProbeError(problem, "return tensors and numbers, which can be compared") from error


def loss_of(probe: ModuleType, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a batch.

    Raises:
        ProbeError: The probe does not define a loss, and the model's output is not a tensor.
    """
    if hasattr(probe, "loss"):
        return _loss(probe.loss(model, as_written(batch)), "loss")
    output = model(**batch[0]) if len(batch) == 1 and isinstance(batch[0], Mapping) else model(*batch)
    if not torch.is_tensor(output):
        raise ProbeError(
            f"the model's output is a {type(output).__name__}, which has no mean square", "define loss(model, batch)"
        )
    square: torch.Tensor = output.square().mean()
    return square


def _loss(loss: Any, function: str) -> torch.Tensor:
    """Return what a probe's `loss` or `step` returned."""
    if not torch.is_tensor(loss):
        loss_text = "None" if loss is None else type(loss).__name__
    elif loss.numel() != 1:
        loss_text = f"a tensor of shape {tuple(loss.shape)}"
    else:
        return loss
    raise ProbeError(f"{function}() returned {loss_text}", "return the loss, a tensor of one number")


def results(step: StepResult, mesh: Mesh, axes: Mapping[str, int], whole: torch.Tensor | None = None) -> list[Local]:
    """Return a step's loss, output and logged values, each with the layout that it should have.

    A loss is the mean over this rank's part, so an average over the batch's axes is pending. Logged values are the
    numbers that every rank would print: equal everywhere, and about the whole batch.

    Args:
        axes: The axes over which the batch is split, with the dims that they split.
        whole: The unsharded model's output, which shows where the batch's dims are.
    """
    tensors = [claimed_as("loss", "scalar", step.loss, mesh, {axis: Partial("avg") for axis in axes})]
    if step.output is not None:
        shape, of_all = tuple(step.output.shape), None if whole is None else tuple(whole.shape)
        placements = due_placements(shape, of_all, step.sizes, axes, mesh)
        tensors.append(claimed_as("output", "output", step.output, mesh, placements))
    for name, value in step.logged.items():
        logged = "log.loss" if name == "loss" else name  # the step's own loss is the one that is called so
        tensors.append(claimed_as(logged, "scalar", value.detach(), mesh, {}))
    return tensors


def due_placements(
    shape: tuple[int, ...], whole: tuple[int, ...] | None, sizes: tuple[int, ...], axes: Mapping[str, int], mesh: Mesh
) -> dict[str, Placement]:
    """Return the placements that an output should have along the batch's axes.

    Args:
        whole: The unsharded model's, if it has one.
        sizes: The shape of this rank's part of the batch.
    """
    dims = output_dims(shape, whole, sizes, num_parts(axes, mesh))
    placements = {dim: Replicate() if at is None else Shard(at) for dim, at in dims.items()}
    return {axis: placements[dim] for axis, dim in axes.items()}


def claimed_as(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh, by_axis: Mapping[str, Placement]) -> Local:
    """Claim a tensor's layout on the run's mesh; a DTensor keeps its own claim along the axes of its own mesh."""
    local = of_tensor(name, role, tensor)
    placements = dict(zip(local.claim[0].axes, local.claim[1], strict=True)) if local.claim else {}
    if local.claim and local.claim[0] != mesh:
        return local
    if isinstance(tensor, DTensor):
        by_axis = {axis: by_axis[axis] for axis in by_axis if axis not in plain_mesh(tensor.device_mesh).axes}
    shape = list(tensor.shape)
    for axis, placement in by_axis.items():
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.axis_size(axis)
    claim = mesh, tuple(by_axis.get(axis, placements.get(axis, Replicate())) for axis in mesh.axes)
    is_assumed = role == "output" and not isinstance(tensor, DTensor)
    return replace(local, shape=tuple(shape), claim=claim, grad=None, assumed=is_assumed)


def gradients(locals_: Sequence[Local]) -> list[Local]:
    """Return the gradients of captured parameters, with their own claims or their parameters'."""
    grads = []
    for local in locals_:
        if local.grad is not None:
            claim = local.grad_claim or local.claim
            grad = Local(local.name, "grad", local.shape, local.grad.detach(), claim, local.flat)
            is_on_same = claim is not None and local.claim is not None and claim[0] == local.claim[0]
            grads.append(replace(grad, own_axes=local.own_axes if is_on_same else ()))
    return grads


FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")


@dataclass(frozen=True, slots=True)
class Clip:
    """A call that clips gradients."""

    function: str
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def apply(self, model: nn.Module) -> None:
        """Clip another model's gradients in the same way."""
        named = dict(model.named_parameters(remove_duplicate=False))
        clip = getattr(torch.nn.utils, self.function)
        clip([named[name] for name in self.names], *self.args, **dict(self.kwargs))


@dataclass
class Clips:
    """The calls that clip a model's gradients while a step runs, by which the unsharded model's are clipped then.

    Only if every rank made the same calls, of parameters that the unsharded model has, after the last backward: else
    the gradients are compared as they are, and clipping that is recognized there is not checked.

    Attributes:
        is_last: Whether nothing wrote to what was clipped before it was clipped again.
    """

    model: nn.Module
    calls: list[Clip] = field(default_factory=list)
    is_last: bool = True
    _left: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def note(self, function: str, params: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call that is about to be made."""
        self.is_last &= self._are_left(params)
        names = {id(param): clean_name(name) for name, param in unwrapped(self.model).named_parameters()}
        self.calls.append(
            Clip(function, tuple(names.get(id(one), "") for one in params), args, tuple(sorted(kwargs.items())))
        )

    def keep(self, params: list[torch.Tensor]) -> None:
        """Keep what a call left, by which it is seen whether it was the last to write it."""
        self._left |= {one: _local(one.grad).clone() for one in params if one.grad is not None}

    def of_step(self) -> tuple[Clip, ...]:
        """Return the calls, if all of them came after backward; none else."""
        return tuple(self.calls) if self.is_last and self._are_left(list(self._left)) else ()

    def _are_left(self, params: list[torch.Tensor]) -> bool:
        kept = ((self._left[one], one.grad) for one in params if one in self._left)
        return all(grad is not None and torch.equal(left, _local(grad)) for left, grad in kept)


@contextmanager
def noted_clips(model: nn.Module, probe: ModuleType) -> Iterator[Clips]:
    """Note calls of torch's clipping inside this context, also by the name that a probe has imported it under."""
    clips = Clips(model)
    places = [vars(torch.nn.utils), vars(probe)]
    originals = {name: getattr(torch.nn.utils, name) for name in FUNCTIONS}
    replaced = [(at, key, name) for name in FUNCTIONS for at in places for key in at if at[key] is originals[name]]
    try:
        for at, key, name in replaced:
            at[key] = _noting(clips, name, originals[name])
        with norms_reduced_first():
            yield clips
    finally:
        for at, key, name in replaced:
            at[key] = originals[name]


def _noting(clips: Clips, name: str, original: Any) -> Any:
    @wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if torch.is_tensor(parameters) else list(parameters)
        clips.note(name, params, args, kwargs)
        returned = original(params, *args, **kwargs)
        clips.keep(params)
        return returned

    return clip


def agreed_clips(clips: tuple[Clip, ...], model: nn.Module) -> tuple[Clip, ...]:
    """Return a sharded step's calls if all ranks made them and the model has the parameters. Every rank calls this."""
    of_all = of_all_ranks(repr(clips))
    param_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    is_known = all(set(clip.names) <= param_names for clip in clips)
    return clips if len(set(of_all)) == 1 and is_known else ()


def _local(grad: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.detach()
