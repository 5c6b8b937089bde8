"""torch's own: DTensors (FSDP2, `parallelize_module`, transformers' TP), other subclasses, FSDP1's flat parameters.

The placements of a DTensor are the claim. Flat parameters are taken apart into the original ones.

Subclasses that wrap tensors are torchao's quantized weights, float8 and others. Their elements are in inner tensors, in
a form that only the class knows, so that neither their bits nor their order say anything. They are named, and what is
not understood is never called wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardviz.dump.records.tensors import FlatRecord
from shardviz.live.capture.meshes import Claim, of_flat_param, on_root, own_axes
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims.local import Local, not_understood
from shardviz.live.compat.fsdp import flat_params
from shardviz.live.compat.meshes import placement_of, root_mesh
from shardviz.live.compat.tensors import has_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return this rank's part of a DTensor, of a plain tensor whose gradient is one, or of what is not understood."""
    grad = tensor.grad if tensor.is_leaf else None
    is_split = isinstance(tensor, DTensor) or isinstance(grad, DTensor)
    values, claim = _local_and_claim(tensor.detach()) if is_split else (tensor, None)
    if why := _reason(values):
        return not_understood(name, role, tensor, why)
    if not is_split:
        return None
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


def groups_of(model: nn.Module) -> dict[str, Any]:
    """Return the replica group and the shard group of the outermost sharded wrapper."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            copies = getattr(module, "_inter_node_pg", None)
            shards = {"fsdp": module.process_group}
            return {"replicate": copies, **shards} if copies is not None else shards
    return {}


def of_model(model: nn.Module, mesh: Mesh | None) -> Iterator[Local]:
    """Yield the original parameters of every flat parameter."""
    for param in flat_params(model):
        grad = None if param.grad is None else param.cut(param.grad.detach())
        # The notation has no layout for a stretch of a tensor-parallel shard: its ids show where it is.
        is_layout = param.shape == param.whole
        record = (FlatRecord(param.shape, param.offset), param.total) if is_layout else None
        claim = of_flat_param(param, mesh) if is_layout else None
        yield Local(param.name, "param", param.whole, param.cut(param.local), claim, record, grad)


def _local_and_claim(tensor: torch.Tensor) -> tuple[torch.Tensor, Claim | None]:
    if not isinstance(tensor, DTensor):
        return tensor, None
    return tensor.to_local(), on_root(tensor.device_mesh, [placement_of(placement) for placement in tensor.placements])


def _reason(tensor: torch.Tensor) -> str:
    """Return why a tensor's elements cannot be read; empty if they can."""
    if isinstance(tensor, DTensor) or has_storage(tensor):
        return ""
    kind = type(tensor)
    inner = getattr(tensor, "__tensor_flatten__", None)
    parts = list(inner()[0]) if callable(inner) else []
    where = f", which keeps them in {', '.join(parts)}" if parts else ", which has no storage"
    of = (
        f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" if kind.__module__ != "torch" else f"{tensor.layout}"
    )
    return f"its elements: it is a {of}{where}"
