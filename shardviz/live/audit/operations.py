"""The audit's operations of torch: each returns the ids that this rank then holds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardviz.layout.placements import Partial, Placement, Shard
from shardviz.live import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.live.audit.cases import Case

Meshes = dict[object, DeviceMesh]


def perform(case: Case, meshes: Meshes) -> torch.Tensor:
    """Run a case and return this rank's part of the result.

    Args:
        case: What to do.
        meshes: Device meshes made so far, by the mesh they are of: process groups are dear.
    """
    key = case.mesh, case.flattened
    if key not in meshes:
        grid = torch.tensor(case.mesh.ranks).reshape(case.mesh.shape)
        meshes[key] = DeviceMesh("cpu", grid, mesh_dim_names=case.mesh.axes)
        if case.flattened:
            compat.flatten_mesh(meshes[key])
    with torch.no_grad(), compat.quiet_redistribution():
        return _OPERATIONS[case.operation](case, meshes[key])


def whole(case: Case) -> torch.Tensor:
    """Return the tensor whose every element is its own id, from 1."""
    return torch.arange(1, torch.Size(case.shape).numel() + 1, dtype=torch.float32).view(case.shape)


def sharded(case: Case, mesh: DeviceMesh, placements: Sequence[Placement], values: torch.Tensor) -> Any:
    """Return a DTensor whose shards the oracle cuts, or a share of them if a sum is pending."""
    region = case.layout(tuple(placements)).region(case.mesh.coord_of(distributed.get_rank()))
    local = values.flatten()[torch.from_numpy(region.flat_ids(case.shape))]
    if any(isinstance(placement, Partial) for placement in placements):
        local = local * case.share(distributed.get_rank())
    spelled = [compat.torch_placement(p) for p in placements]
    return DTensor.from_local(local, mesh, spelled, shape=values.shape, stride=values.stride(), run_check=False)


def _distribute(case: Case, mesh: DeviceMesh) -> torch.Tensor:
    placements = [compat.torch_placement(p) for p in case.target]
    local: torch.Tensor = distribute_tensor(whole(case), mesh, placements).to_local()
    return local


def _gather(case: Case, mesh: DeviceMesh) -> torch.Tensor:
    full: torch.Tensor = sharded(case, mesh, case.source, whole(case)).full_tensor()
    return full


def _redistribute(case: Case, mesh: DeviceMesh) -> torch.Tensor:
    placements = [compat.torch_placement(p) for p in case.target]
    local: torch.Tensor = sharded(case, mesh, case.source, whole(case)).redistribute(placements=placements).to_local()
    return local


def _fsdp_tp(case: Case, mesh: DeviceMesh) -> torch.Tensor:
    rows, columns = case.shape
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight.copy_(whole(case))
    model = nn.Sequential(linear)
    column_wise = case.target[-1] == Shard(0)
    names = mesh.mesh_dim_names
    assert names is not None
    parallelize_module(model, mesh[names[-1]], {"0": ColwiseParallel() if column_wise else RowwiseParallel()})
    fully_shard(model, mesh=mesh[names[:-1]])
    weight: Any = linear.weight
    local: torch.Tensor = weight.to_local()
    return local


def _checkpoint(case: Case, mesh: DeviceMesh) -> torch.Tensor:
    """Save under one layout and load under another."""
    path = [tempfile.mkdtemp(prefix="shardviz-audit-") if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(path)
    try:
        save({"w": sharded(case, mesh, case.source, whole(case))}, checkpoint_id=path[0])
        empty = sharded(case, mesh, case.target, torch.full(case.shape, -1.0))
        load({"w": empty}, checkpoint_id=path[0])
        local: torch.Tensor = empty.to_local()
        return local
    finally:
        distributed.barrier()
        if distributed.get_rank() == 0:
            shutil.rmtree(Path(path[0]))


_OPERATIONS: dict[str, Callable[[Case, DeviceMesh], torch.Tensor]] = {
    "distribute": _distribute,
    "gather": _gather,
    "redistribute": _redistribute,
    "fsdp_tp": _fsdp_tp,
    "checkpoint": _checkpoint,
}
