"""One training step of a probe, sharded on every rank and unsharded beside it, so that numbers can be compared.

A probe that has a `batch()` is stepped. Both steps start from the same weights, in float64, so that a difference is not
rounding. A probe may define:

    batch()                    the whole batch: a tensor, or a tuple or dict of the model's arguments
    BATCH_AXES                 the mesh axes over which the batch's dim 0 is split; default: every rank sees all of it
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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records import CallRecord
from shardviz.errors import ProbeError
from shardviz.layout.placements import Partial, Placement, Replicate, Shard
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.locals import Local, of_tensor, unwrapped
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.compat import DTensor, dividing_float64_once
from shardviz.live.step.observe import Observed, observed
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh

Batch = tuple[Any, ...]
Stages = Mapping[int, "nn.Module"]
DATA_AXES = ("dp", "ddp", "data", "fsdp", "hsdp", "replicate", "shard")
"""Prefixes of the names of mesh axes over which training splits its batch."""


@dataclass
class StepResult:
    """The result of one step.

    Attributes:
        loss: The loss, as the step returned it.
        output: The model's output in its last forward; None if it is not a tensor.
        logged: The values that `log` returned.
        seen: The record of the step while it ran.
        runs: How often the model ran for that output; micro-batches that make up the batch are one run.
    """

    loss: torch.Tensor
    output: torch.Tensor | None
    logged: Mapping[str, Any]
    seen: Observed
    runs: int = 1


def batch_axes(probe: ModuleType, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which the batch is split.

    Raises:
        MeshError: The mesh has no such axis.
    """
    axes = tuple(getattr(probe, "BATCH_AXES", ()))
    for axis in axes:
        mesh.axis_index(axis)
    return axes


def whole_batch(probe: ModuleType, parts: int, *, double: bool = True) -> Batch:
    """Return the probe's batch, in float64 or as it is, the same on every rank.

    Rows beyond a multiple of `parts` are dropped: a mean over unequal parts is not the mean of the whole.

    Raises:
        ProbeError: There are fewer rows than parts.
    """
    torch.manual_seed(1)
    batch = probe.batch()
    return tuple(_each(part, lambda tensor: _whole(tensor, parts, double=double)) for part in _as_tuple(batch))


def _as_tuple(batch: Any) -> Batch:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _each(part: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a part of a batch with every tensor in it changed, also inside a dict."""
    if isinstance(part, Mapping):
        return {key: _each(value, change) for key, value in part.items()}
    return change(part) if torch.is_tensor(part) else part


def _whole(tensor: torch.Tensor, parts: int, *, double: bool) -> torch.Tensor:
    if tensor.ndim:
        if len(tensor) < parts:
            raise ProbeError(
                f"the batch has {len(tensor)} rows for {parts} ranks", f"return at least {parts} rows from batch()"
            )
        tensor = tensor[: len(tensor) // parts * parts]
    return tensor.double() if double and tensor.is_floating_point() else tensor


def unnamed_batch_axes(probe: ModuleType, mesh: Mesh) -> tuple[str, ...]:
    """Return axes named like data parallelism, if the probe does not define BATCH_AXES.

    Ranks that see the same batch have the same gradients, reduced or not, so a missing reduction would not show.
    """
    if hasattr(probe, "BATCH_AXES"):
        return ()
    return tuple(axis for axis in mesh.axes if axis.startswith(DATA_AXES) and mesh.axis_size(axis) > 1)


def own_batch(batch: Batch, axes: Sequence[str], mesh: DeviceMesh) -> Batch:
    """Return this rank's part of the batch: the rows of its coordinate on `axes`, outermost first."""
    parts, mine = 1, 0
    for axis in axes:
        size = mesh[axis].size()
        parts, mine = parts * size, mine * size + mesh.get_local_rank(axis)
    return part_of(batch, mine, parts)


def part_of(batch: Batch, number: int, parts: int) -> Batch:
    """Return one of several equal parts of a batch, by rows."""
    return tuple(_each(part, lambda tensor: tensor.chunk(parts)[number] if tensor.ndim else tensor) for part in batch)


def stages_of(probe: ModuleType, model: nn.Module, mesh: DeviceMesh) -> Stages:
    """Return this rank's stages of a pipeline by number; empty for a probe that does not name them."""
    return probe.stages(model, mesh) if hasattr(probe, "stages") else {}


def has_last_stage(probe: ModuleType, stages: Stages, mesh: DeviceMesh) -> bool:
    """Whether this rank has the output: the stage of the highest number, or the last place. Every rank calls this."""
    axes = getattr(probe, "STAGE_AXES", ())
    mine = max(stages, default=-1)
    last = max(of_all_ranks(mine)) if axes else mine
    if last >= 0:
        return mine == last
    return all(mesh.get_local_rank(axis) == mesh[axis].size() - 1 for axis in axes)


def sharded_step(
    probe: ModuleType,
    model: nn.Module,
    batch: Batch,
    mesh: DeviceMesh,
    stages: Stages | None = None,
    *,
    has_output: bool = True,
) -> StepResult:
    """Step the sharded model on this rank's part of the batch.

    Args:
        probe: The probe, for its loss or its step.
        model: The sharded model.
        batch: This rank's part of the batch.
        mesh: The mesh, for the probe's step.
        stages: This rank's stages of a pipeline, by number.
        has_output: Whether the model's output is this rank's: in a pipeline the last stage has it.
    """
    torch.manual_seed(2)
    with dividing_float64_once(), observed(model, stages) as seen:
        if hasattr(probe, "step"):
            loss = probe.step(model, _passed(batch), mesh)
        else:
            loss = loss_of(probe, model, batch)
            torch.autograd.backward(loss)
    logged = logged_by(probe, model, batch, loss)
    output, runs = _output(seen, batch, is_pipeline=hasattr(probe, "STAGE_AXES"))
    output = output if has_output else None
    if output is not None and hasattr(probe, "whole_output"):
        output = probe.whole_output(output, mesh)
    return StepResult(loss.detach(), output, logged, seen, runs)


def calls(probe: ModuleType, model: nn.Module, mesh: DeviceMesh) -> list[CallRecord]:
    """Return the collectives to compare with their definition."""
    named = probe.collective_calls(unwrapped(model), mesh) if hasattr(probe, "collective_calls") else {}
    return [CallRecord(module, op, tuple(ranks)) for module, (op, ranks) in named.items()]


def _output(seen: Observed, batch: Batch, *, is_pipeline: bool) -> tuple[torch.Tensor | None, int]:
    """Return the model's last output, joined if it ran on micro-batches one after the other, and its runs."""
    outputs = [output for output in seen.outputs if output.ndim]
    if not outputs:
        return None, 0
    rows = next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 0)
    in_parts = len(outputs) > 1 and len(outputs[-1]) != rows == sum(map(len, outputs))
    return (torch.cat(outputs), 1) if is_pipeline or in_parts else (outputs[-1], len(outputs))


def logged_by(probe: ModuleType, model: nn.Module, batch: Batch, loss: torch.Tensor) -> Mapping[str, Any]:
    """Return the values that the training loop would print, by name; a single number is named `log`."""
    logged = probe.log(model, _passed(batch), loss) if hasattr(probe, "log") else {}
    return logged if isinstance(logged, Mapping) else {"log": logged}


def _passed(batch: Batch) -> Any:
    """Return a batch as the probe wrote it: a batch of one tensor is passed as that tensor."""
    return batch[0] if len(batch) == 1 else batch


def loss_of(probe: ModuleType, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a batch.

    Raises:
        ProbeError: The probe does not define a loss, and the model's output is not a tensor.
    """
    if hasattr(probe, "loss"):
        loss: torch.Tensor = probe.loss(model, _passed(batch))
        return loss
    output = model(**batch[0]) if len(batch) == 1 and isinstance(batch[0], Mapping) else model(*batch)
    if not torch.is_tensor(output):
        raise ProbeError(
            f"the model's output is a {type(output).__name__}, which has no mean square",
            "define loss(model, batch)",
        )
    square: torch.Tensor = output.square().mean()
    return square


def results(step: StepResult, mesh: Mesh, axes: Sequence[str], whole: torch.Tensor | None = None) -> list[Local]:
    """Return a step's loss, output and logged values, each with the layout that it should have.

    A loss is the mean over this rank's part, so an average over the batch's axes is pending. Logged values are the
    numbers that every rank would print: equal everywhere, and about the whole batch.

    Args:
        step: The result of the step.
        mesh: The run's mesh.
        axes: The axes over which the batch is split.
        whole: The unsharded model's output, which shows the dim of the batch's rows.
    """
    found = [_claimed("loss", "scalar", step.loss, mesh, {axis: Partial("avg") for axis in axes})]
    if step.output is not None:
        is_whole = whole is not None and step.output.shape == whole.shape  # the model itself gathered its rows
        rows = Replicate() if is_whole else Shard(_dim_of_rows(step.output, whole))
        found.append(_claimed("output", "output", step.output, mesh, dict.fromkeys(axes, rows)))
    for name, value in step.logged.items():
        tensor = value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.float64)
        found.append(_claimed(_logged_as(name), "scalar", tensor.detach(), mesh, {}))
    return found


def _logged_as(name: str) -> str:
    """Return the name of a logged value: the step's own loss is the one that is called `loss`."""
    return "log.loss" if name == "loss" else name


def _dim_of_rows(output: torch.Tensor, whole: torch.Tensor | None) -> int:
    """Return the first dim that is smaller than the unsharded model's: not every model returns rows first."""
    shapes = zip(output.shape, whole.shape if whole is not None else (), strict=False)
    return next((dim for dim, (own, all_of_it) in enumerate(shapes) if own != all_of_it), 0)


def _claimed(name: str, role: Any, tensor: torch.Tensor, mesh: Mesh, by_axis: Mapping[str, Placement]) -> Local:
    """Claim a tensor's layout on the run's mesh; a DTensor keeps its own claim along the axes of its own mesh."""
    local = of_tensor(name, role, tensor)
    own = dict(zip(local.claim[0].axes, local.claim[1], strict=True)) if local.claim else {}
    if local.claim and local.claim[0] != mesh:
        return local
    if isinstance(tensor, DTensor):
        by_axis = {axis: by_axis[axis] for axis in by_axis if axis not in plain_mesh(tensor.device_mesh).axes}
    shape = list(tensor.shape)
    for axis, placement in by_axis.items():
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.axis_size(axis)
    claim = mesh, tuple(by_axis.get(axis, own.get(axis, Replicate())) for axis in mesh.axes)
    return replace(local, shape=tuple(shape), claim=claim, grad=None)


def gradients(locals_: Sequence[Local]) -> list[Local]:
    """Return the gradients of captured parameters, with their own claims or their parameters'."""
    return [
        Local(local.name, "grad", local.shape, local.grad.detach(), local.grad_claim or local.claim, local.flat)
        for local in locals_
        if local.grad is not None
    ]
