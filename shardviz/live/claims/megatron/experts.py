"""Megatron's experts: each expert-parallel rank has others, which it numbers from 0.

They are distinguished by their global numbers, as in a checkpoint of a model without expert parallel. Copies are on the
ranks of the expert's own data-parallel group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Placement, Replicate, Shard, StridedShard
from shardviz.live.claims.local import Local, not_understood, plain
from shardviz.live.claims.megatron.layers import is_up, ranks_of
from shardviz.live.compat import clean_name

if TYPE_CHECKING:
    import torch

    from shardviz.dump.records.base import Role

EXPERTS = ".local_experts."


def names(model: nn.Module) -> dict[str, str]:
    """Return the names of experts' weights with the experts' global numbers, by their own names."""
    global_names: dict[str, str] = {}
    for prefix, module in model.named_modules() if is_up() else ():
        numbers = getattr(module, "local_expert_indices", None)
        experts = getattr(getattr(module, "experts", None), "local_experts", None)
        if numbers is not None and isinstance(experts, nn.ModuleList) and len(numbers) == len(experts):
            before = clean_name(f"{prefix}.experts{EXPERTS}").lstrip(".")
            for local_number, (number, expert) in enumerate(zip(numbers, experts, strict=True)):
                tensors = (*expert.named_parameters(remove_duplicate=False), *expert.named_buffers())
                global_names |= {
                    f"{before}{local_number}.{clean_name(name)}": f"{before}{number}.{name}" for name, _ in tensors
                }
    return global_names


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return an expert's weight; None for other tensors, or if all ranks have all experts."""
    if not is_up() or getattr(tensor, "allreduce", True) is not False:
        return None
    if len(ranks_of("get_expert_model_parallel_group")) == 1:
        return None
    if EXPERTS not in name:
        why = "its elements: megatron-core has several experts in it, and expert-parallel ranks have other experts"
        return not_understood(name, role, tensor, why)
    copies, parts = ranks_of("get_expert_data_parallel_group"), ranks_of("get_expert_tensor_parallel_group")
    is_split = bool(getattr(tensor, "tensor_model_parallel", False)) and len(parts) > 1
    if len(parts) > 1 and len(copies) > 1:
        why = "its layout: it is an expert's weight in megatron-core, under expert tensor and data parallel at once"
        return not_understood(name, role, tensor, why)
    local, shape = plain(name, role, tensor), list(tensor.shape)
    placement: Placement = Replicate()
    if is_split:
        dim, stride = int(tensor.partition_dim), int(tensor.partition_stride)  # type: ignore[attr-defined]
        placement = Shard(dim) if stride == 1 else StridedShard(dim, stride)
        shape[dim] *= len(parts)
    on = Mesh(("etp",), (len(parts),), parts) if len(parts) > 1 else Mesh(("edp",), (len(copies),), copies)
    return Local(name, role, tuple(shape), local.values, (on, (placement,)), grad=local.grad)
