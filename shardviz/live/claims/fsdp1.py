"""FSDP1's flat parameters, taken apart into the original ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel

from shardviz.dump.records.tensors import FlatRecord
from shardviz.live.capture.meshes import of_flat_param
from shardviz.live.claims.local import Local
from shardviz.live.compat import flat_params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from shardviz.layout.mesh import Mesh


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
