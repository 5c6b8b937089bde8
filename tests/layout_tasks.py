"""Tasks that test_layout_on_ranks.py runs on real ranks: torch shards an arange, and each rank says what it holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor, placement_types

from shardviz import placements as plain

if TYPE_CHECKING:
    from shardviz.live.world import World
    from shardviz.mesh import Mesh

Case = tuple[tuple[int, ...], tuple[plain.Placement, ...]]


def in_torch(placement: plain.Placement) -> Placement:
    match placement:
        case plain.Shard(dim):
            return placement_types.Shard(dim)
        case plain.StridedShard(dim, factor):
            return placement_types._StridedShard(dim, split_factor=factor)
        case plain.Partial(op):
            return placement_types.Partial(op)
        case plain.Replicate():
            return placement_types.Replicate()


def distribute(world: World, mesh: Mesh, cases: list[Case], source: int | None) -> list[list[int]]:
    """Return what this rank holds of each case after `distribute_tensor`, scattered from a rank or cut on each."""
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
    held = []
    for shape, placements in cases:
        whole = torch.arange(math.prod(shape)).reshape(shape)
        sharded = distribute_tensor(whole, device_mesh, [in_torch(p) for p in placements], src_data_rank=source)
        held.append(sharded.to_local().flatten().tolist())
    return held


def fsdp2_over(world: World, mesh: Mesh, sizes: list[int]) -> list[tuple[list[int], tuple[plain.Placement, ...]]]:
    """Split over the axes after the first with `distribute_tensor`, then over the first with `fully_shard`."""
    from shardviz.live.compat import fully_shard, placement_of

    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
    inner = device_mesh[mesh.axes[1:]]
    held = []
    for size in sizes:
        module = nn.Module()
        rows = distribute_tensor(torch.arange(float(size)), inner, [placement_types.Shard(0)] * inner.ndim)
        module.weight = nn.Parameter(rows)
        fully_shard(module, mesh=device_mesh[mesh.axes[0]])
        assert isinstance(module.weight, DTensor)
        label = tuple(placement_of(placement) for placement in module.weight.placements)
        held.append(([int(row) for row in module.weight.to_local().tolist()], label))
    return held
