"""DTensors (FSDP2, `parallelize_module`, transformers' TP): the placements are the claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from shardviz.live.capture.meshes import Claim, on_root, own_axes
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims.local import Local, not_understood
from shardviz.live.claims.subclasses import reason_of
from shardviz.live.compat import placement_of, root_mesh

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return this rank's part of a DTensor, or of a plain tensor whose gradient is one."""
    grad = tensor.grad if tensor.is_leaf else None
    if not isinstance(tensor, DTensor) and not isinstance(grad, DTensor):
        return None
    values, claim = _local_and_claim(tensor.detach())
    if why := reason_of(values):
        return not_understood(name, role, tensor, why)
    grad_values, grad_claim = _local_and_claim(grad.detach()) if grad is not None else (None, None)
    axes = own_axes(tensor.device_mesh, claim[0]) if isinstance(tensor, DTensor) and claim else ()
    shape = tuple(tensor.shape)
    return Local(name, role, shape, values, claim, grad=grad_values, grad_claim=grad_claim, own_axes=axes)


def marks(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(tensor, DTensor)


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the largest mesh that a model's DTensors are on, sub-meshes counted as their root."""
    tensors = [tensor for _, _, tensor in named_tensors(model) if isinstance(tensor, DTensor)]
    roots = [root_mesh(tensor.device_mesh) for tensor in tensors]
    return max(roots, key=lambda mesh: (mesh.size(), mesh.ndim), default=None)


def _local_and_claim(tensor: torch.Tensor) -> tuple[torch.Tensor, Claim | None]:
    if not isinstance(tensor, DTensor):
        return tensor, None
    return tensor.to_local(), on_root(tensor.device_mesh, [placement_of(placement) for placement in tensor.placements])
