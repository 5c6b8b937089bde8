"""One training step of a probe, sharded on every rank and unsharded beside it, so that numbers can be compared.

A probe that has a `batch()` is stepped. Both steps start from the same weights, in float64, so that what is left of a
difference is no rounding. What a probe may define:

    batch()                    the whole batch: a tensor, or a tuple of what the model takes
    BATCH_AXES                 the mesh axes over which the batch's dim 0 is split; default: every rank sees all of it
    loss(model, batch)         the mean loss of the batch; default: the mean square of the model's output
    step(model, batch, mesh)   one sharded step, backward included; default: `loss` and its backward
    optimizer(model, mesh)     what updates the weights after the step; default: Adam, of which only the state is kept
    stages(model, mesh)        a pipeline's stages that this rank has, by number; their runs are followed
    STAGE_AXES                 the mesh axes along which ranks have different layers; the last has the output
    log(model, batch, loss)    what the training loop would print after the step, by name
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardviz.errors import ProbeError
from shardviz.live.capture import Local, of_tensor
from shardviz.live.compat import DTensor
from shardviz.live.observe import Observed, observed
from shardviz.placements import Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.mesh import Mesh

Batch = tuple[Any, ...]
DATA_AXES = ("dp", "ddp", "data", "fsdp", "hsdp", "replicate", "shard")
"""How the names of mesh axes begin over which training splits its batch."""


@dataclass
class Step:
    """What one step left behind.

    Attributes:
        loss: The loss, as the step returned it.
        output: The model's output in its last forward; None where it is no tensor.
        logged: What `log` returned.
        seen: What was watched while it ran.
        optimizer: What updated the weights; None of the unsharded model's, and where the probe defines none.
    """

    loss: torch.Tensor
    output: torch.Tensor | None
    logged: Mapping[str, Any]
    seen: Observed
    optimizer: torch.optim.Optimizer | None = None


def batch_axes(probe: ModuleType, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which the batch is split.

    Raises:
        MeshError: The mesh has no such axis.
    """
    axes = tuple(getattr(probe, "BATCH_AXES", ()))
    for axis in axes:
        mesh.axis_index(axis)
    return axes


def whole_batch(probe: ModuleType, parts: int) -> Batch:
    """Return the probe's batch in float64, the same on every rank.

    Rows beyond a multiple of `parts` are left out: a mean over unequal parts is not the mean of the whole.

    Raises:
        ProbeError: There are fewer rows than parts.
    """
    torch.manual_seed(1)
    batch = probe.batch()
    own: list[Any] = []
    for part in batch if isinstance(batch, tuple) else (batch,):
        if not torch.is_tensor(part):
            own.append(part)
            continue
        rows = part.shape[0] // parts * parts if part.ndim else 0
        if part.ndim and not rows:
            raise ProbeError(
                f"a batch of {part.shape[0]} rows for {parts} ranks", f"let batch() return {parts} or more"
            )
        whole = part[:rows] if part.ndim else part
        own.append(whole.double() if whole.is_floating_point() else whole)
    return tuple(own)


def unnamed_batch_axes(probe: ModuleType, mesh: Mesh) -> tuple[str, ...]:
    """Return axes that go by a name of data parallelism, where the probe does not say how its batch is split.

    Ranks that see the same batch have the same gradients, reduced or not.
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
    return tuple(part.chunk(parts)[mine] if torch.is_tensor(part) and part.ndim else part for part in batch)


def reference_step(probe: ModuleType, model: nn.Module, batch: Batch) -> Step:
    """Step the unsharded model on the whole batch."""
    torch.manual_seed(2)
    with observed(model) as seen:
        loss = _loss(probe, model, batch)
        torch.autograd.backward(loss)
    output = seen.outputs[-1] if seen.outputs else None
    return Step(loss.detach(), output, _logged(probe, model, batch, loss), seen)


def sharded_step(probe: ModuleType, model: nn.Module, batch: Batch, mesh: DeviceMesh) -> Step:
    """Step the sharded model on this rank's part of the batch."""
    torch.manual_seed(2)
    stages = probe.stages(model, mesh) if hasattr(probe, "stages") else {}
    with observed(model, stages) as seen:
        if hasattr(probe, "step"):
            loss = probe.step(model, _passed(batch), mesh)
        else:
            loss = _loss(probe, model, batch)
            torch.autograd.backward(loss)
    logged = _logged(probe, model, batch, loss)
    optimizer = probe.optimizer(model, mesh) if hasattr(probe, "optimizer") else None
    if optimizer is not None:
        optimizer.step()
    return Step(loss.detach(), _output(probe, seen, mesh), logged, seen, optimizer)


def _output(probe: ModuleType, seen: Observed, mesh: DeviceMesh) -> torch.Tensor | None:
    """Return what the model put out last, or a pipeline's last stage over all micro-batches."""
    axes = getattr(probe, "STAGE_AXES", ())
    if not seen.outputs or any(mesh.get_local_rank(axis) != mesh[axis].size() - 1 for axis in axes):
        return None
    return torch.cat(seen.outputs) if axes else seen.outputs[-1]


def _logged(probe: ModuleType, model: nn.Module, batch: Batch, loss: torch.Tensor) -> Mapping[str, Any]:
    logged: Mapping[str, Any] = probe.log(model, _passed(batch), loss) if hasattr(probe, "log") else {}
    return logged


def _passed(batch: Batch) -> Any:
    """A batch of one is passed as itself, as the probe wrote it."""
    return batch[0] if len(batch) == 1 else batch


def _loss(probe: ModuleType, model: nn.Module, batch: Batch) -> torch.Tensor:
    if hasattr(probe, "loss"):
        loss: torch.Tensor = probe.loss(model, _passed(batch))
        return loss
    output = model(*batch)
    square: torch.Tensor = output.square().mean()
    return square


def results(step: Step, mesh: Mesh, axes: Sequence[str]) -> list[Local]:
    """Return a sharded step's loss, output and logged values, each with where it is claimed to be.

    A loss is the mean of this rank's part, so an average over the batch's axes is pending. Logged values are what
    every rank would print: equal everywhere, and of the whole batch.
    """
    found = [_claimed("loss", "scalar", step.loss, mesh, {axis: Partial("avg") for axis in axes})]
    if step.output is not None:
        found.append(_claimed("output", "output", step.output, mesh, {axis: Shard(0) for axis in axes}))
    for name, value in step.logged.items():
        tensor = value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.float64)
        found.append(_claimed(name, "scalar", tensor.detach(), mesh, {}))
    return found


def _claimed(name: str, role: Any, tensor: torch.Tensor, mesh: Mesh, by_axis: Mapping[str, Placement]) -> Local:
    """Claim a plain tensor's layout on the run's mesh; a DTensor claims for itself."""
    if isinstance(tensor, DTensor):
        return of_tensor(name, role, tensor)
    shape = list(tensor.shape)
    for axis, placement in by_axis.items():
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.axis_size(axis)
    claim = mesh, tuple(by_axis.get(axis, Replicate()) for axis in mesh.axes)
    return Local(name, role, tuple(shape), tensor, claim)


def gradients(locals_: Sequence[Local]) -> list[Local]:
    """Return the gradients of captured parameters, claimed where their parameters are."""
    return [
        Local(local.name, "grad", local.shape, local.grad.detach(), local.grad_claim or local.claim, local.flat)
        for local in locals_
        if local.grad is not None
    ]
