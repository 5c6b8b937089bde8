"""DeepSpeed's ZeRO-3: parameters flattened, padded and split over a group, then emptied.

The padding behind `ds_numel` is whatever was in memory, and is not looked at.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import distributed

from shardviz.dump.records.tensors import FlatRecord
from shardviz.live.capture.meshes import of_flat_param
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims.deepspeed.fragment import Fragment
from shardviz.live.claims.flat import FlatParam
from shardviz.live.claims.local import Local, not_understood
from shardviz.live.compat import clean_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return this rank's range of a parameter that DeepSpeed partitioned; else None."""
    held: Any = getattr(tensor, "ds_tensor", None)
    if held is None:
        return None
    shape = tuple(int(size) for size in tensor.ds_shape)  # type: ignore[attr-defined]
    if why := _reason(held):
        return not_understood(name, role, tensor.new_empty(shape, device="meta"), why)
    param = _flat(name, shape, tensor, held)
    record = FlatRecord(shape, 0), param.total
    return Local(name, role, shape, param.cut(param.local), of_flat_param(param, mesh), record)


def marks(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed has partitioned a parameter."""
    return hasattr(tensor, "ds_tensor")


def groups_of(model: nn.Module) -> dict[str, Any]:
    """Return the group that most parameters are split over: experts have smaller ones."""
    groups = [param.ds_process_group for param in model.parameters() if hasattr(param, "ds_process_group")]
    return {"dp": max(groups, key=lambda group: group.size())} if groups else {}


def fragments(engine: nn.Module, model: nn.Module) -> Iterator[Fragment]:
    """Yield this rank's fragments of the master copies and moments of partitioned parameters."""
    visited = set()
    for _, name, tensor in named_tensors(model):
        optimizer = getattr(tensor, "_z3_optimizer", None)
        if optimizer is not None and marks(tensor) and tensor.requires_grad and id(tensor) not in visited:
            visited.add(id(tensor))
            group, at, size = optimizer.grad_position[optimizer.get_param_id(tensor)]
            on_disk = optimizer.fp32_partitioned_groups_flat[group].numel() < at + size
            if not on_disk and not _reason(tensor.ds_tensor):  # type: ignore[attr-defined]
                yield _fragment(clean_name(name), tensor, optimizer)


def _fragment(name: str, param: Any, optimizer: Any) -> Fragment:
    """Describe a master copy: split evenly over the group and padded, like the weight."""
    ranks = tuple(distributed.get_process_group_ranks(param.ds_process_group))
    group, at, partition_size = optimizer.grad_position[optimizer.get_param_id(param)]
    start = ranks.index(distributed.get_rank()) * partition_size
    size = max(0, min(partition_size, param.ds_numel - start))
    flat = optimizer.fp32_partitioned_groups_flat[group]
    weight = param.ds_tensor.detach()[:size]
    buffers = {
        kind: state.detach().flatten()
        for kind, state in optimizer.optimizer.state.get(flat, {}).items()
        if hasattr(state, "numel") and state.numel() == flat.numel() > 1
    }
    values = flat.detach()[at : at + size]
    shape = tuple(int(size) for size in param.ds_shape)
    return Fragment(
        name,
        shape,
        ranks,
        min(start, param.ds_numel),
        values,
        weight,
        is_whole=len(ranks) == 1,
        offset=0,
        part=partition_size,
        states={kind: buffer[at : at + size] for kind, buffer in buffers.items()},
        buffer=int(group),
        buffers=buffers,
        group=param.ds_process_group,
    )


def _reason(held: Any) -> str:
    """Return why a partition cannot be read; empty if it can."""
    if hasattr(held, "ds_quant_scale"):
        return "its elements: DeepSpeed ZeRO-3 holds them quantized"
    if not held.numel() or held.ndim != 1:
        return "its elements: DeepSpeed ZeRO-3 has moved them to a disk"
    return ""


def _flat(name: str, shape: tuple[int, ...], tensor: Any, held: torch.Tensor) -> FlatParam:
    """Describe a partition as a flat parameter of its own."""
    ranks = tuple(distributed.get_process_group_ranks(tensor.ds_process_group))
    me, size = ranks.index(distributed.get_rank()), held.numel()
    assert math.prod(shape) <= size * len(ranks)
    rank = (distributed.get_rank(),)
    return FlatParam(name, "", shape, shape, 0, size * len(ranks), held.detach(), size * me, ranks, rank, None)
