"""Megatron-core's layers: plain weights, born sharded, with `partition_dim` and `partition_stride` on each.

The mesh is what `parallel_state` says. Its axes are `pp`, `dp`, `cp` and `tp`; axes of one rank are left out.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import distributed

from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Placement, Replicate, Shard, StridedShard
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims.local import Local, not_understood, plain

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardviz.dump.records import Role
    from shardviz.live.capture.meshes import Claim

AXES = {
    "pp": "get_pipeline_model_parallel_group",
    "dp": "get_data_parallel_group",
    "cp": "get_context_parallel_group",
    "tp": "get_tensor_model_parallel_group",
}
"""The functions of `parallel_state` that have the groups, outermost first."""


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return a weight of a Megatron layer; None for any other tensor, copies of Megatron among them."""
    if not _is_up():
        return None
    if getattr(tensor, "allreduce", True) is False and _size("get_expert_model_parallel_group") > 1:
        why = "its elements: it is an expert's weight in megatron-core, and expert-parallel ranks have other experts"
        return not_understood(name, role, tensor, why)
    if not getattr(tensor, "tensor_model_parallel", False):
        return None
    ranks = _ranks("get_tensor_model_parallel_group")
    if len(ranks) == 1:
        return None
    marked: Any = tensor
    dim, stride = int(marked.partition_dim), int(marked.partition_stride)
    shape = list(tensor.shape)
    shape[dim] *= len(ranks)
    local = plain(name, role, tensor)
    return Local(name, role, tuple(shape), local.values, _claim(ranks, dim, stride, mesh), grad=local.grad)


def marks(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a split weight of a Megatron layer."""
    return bool(getattr(tensor, "tensor_model_parallel", False)) and _is_up()


def groups_of(model: nn.Module) -> dict[str, Any]:
    """Return Megatron's groups of more than one rank by axis, if the model has a layer of Megatron's."""
    is_used = _is_up() and any(hasattr(tensor, "partition_dim") for _, _, tensor in named_tensors(model))
    groups = {axis: _group(get) for axis, get in AXES.items()} if is_used else {}
    return {axis: group for axis, group in groups.items() if group.size() > 1}


def _claim(ranks: tuple[int, ...], dim: int, stride: int, mesh: Mesh | None) -> Claim:
    split: Placement = Shard(dim) if stride == 1 else StridedShard(dim, stride)
    for axis in mesh.axes if mesh is not None else ():
        assert mesh is not None
        if ranks in mesh.groups(axis):
            return mesh, tuple(split if axis == name else Replicate() for name in mesh.axes)
    return Mesh(("tp",), (len(ranks),), ranks), (split,)


def _state() -> Any:
    return sys.modules.get("megatron.core.parallel_state")


def _is_up() -> bool:
    state = _state()
    return state is not None and bool(state.model_parallel_is_initialized())


def _group(get: str) -> Any:
    return getattr(_state(), get)()


def _ranks(get: str) -> tuple[int, ...]:
    return tuple(distributed.get_process_group_ranks(_group(get)))


def _size(get: str) -> int:
    return len(_ranks(get))
