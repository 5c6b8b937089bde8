"""The subjects of assertions (modules, tensors, optimizers, or tensors by name) as this rank has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardviz.errors import ShardvizError
from shardviz.live.capture.locals import local_tensors, of_tensor, unwrapped
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.compat import root_mesh
from shardviz.live.step.step import gradients
from shardviz.testing.assertions import current

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.live.capture.locals import Local

Subject = nn.Module | torch.Tensor | Optimizer | Mapping[str, torch.Tensor]
UNNAMED = "tensor"
"""The name of a tensor that was passed without one."""


def locals_of(subject: Subject, mesh: DeviceMesh | None, of: Collection[Role] = ("param", "buffer")) -> list[Local]:
    """Return this rank's tensors of a subject.

    Args:
        subject: A module's parameters and buffers and their gradients, an optimizer's state, or tensors.
        mesh: The mesh of the job, if there is one.
        of: The roles of the tensors to return for a module.

    Raises:
        ShardvizError: The subject is of another type.
    """
    if isinstance(subject, nn.Module):
        found = list(local_tensors(unwrapped(subject), plain_mesh(mesh) if mesh is not None else None))
        grads = gradients(found) if "grad" in of else []
        return [*(local for local in found if local.role in of), *grads]
    if isinstance(subject, torch.Tensor):
        return [of_tensor(UNNAMED, "activation", subject)]
    if isinstance(subject, Optimizer):
        return [of_tensor(name, "optim", tensor) for name, tensor in _states(subject)]
    if isinstance(subject, Mapping):
        return [of_tensor(name, "activation", tensor) for name, tensor in subject.items()]
    raise ShardvizError(
        f"a {type(subject).__name__} has no tensors to check",
        "pass a module, a tensor, an optimizer, or tensors by name",
    )


def check_values(locals_: Iterable[Local]) -> None:
    """Check that tensors have values to compare.

    Raises:
        ShardvizError: A tensor is on the meta device.
    """
    for local in locals_:
        if local.values.is_meta:
            raise ShardvizError(
                f"{local.name} is on the meta device and has no values to compare",
                "materialize the model first: call to_empty, and draw or load its weights",
            )


def device_mesh_of(subject: Subject, given: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of the job: the given one, the test's, or that of a DTensor; None if there is none."""
    known = given if given is not None else current.device_mesh.get()
    if known is not None:
        return known
    return next((root_mesh(tensor.device_mesh) for tensor in _tensors(subject) if isinstance(tensor, DTensor)), None)


def _tensors(subject: Subject) -> Iterator[torch.Tensor]:
    if isinstance(subject, nn.Module):
        yield from subject.parameters()
    elif isinstance(subject, torch.Tensor):
        yield subject
    elif isinstance(subject, Optimizer):
        yield from (tensor for _, tensor in _states(subject))
    elif isinstance(subject, Mapping):
        yield from subject.values()


def _states(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield an optimizer's state: by the name of its parameter if known, else by its number."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        owner = names[number] if len(names) == len(parameters) else str(number)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{owner}.{key}", value
