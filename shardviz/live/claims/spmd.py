"""`spmd_types`, torchtitan's default: plain tensors, annotated along each mesh axis.

The types are in `_local_type`, by axis: replicated, invariant, varying or partial. Which dim an axis splits is in
`_partition_spec`. An axis knows its ranks, not its process group. Tried on spmd_types 0.2.3.
"""

from __future__ import annotations

import gc
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Partial, Placement, Replicate, Shard
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims.local import Local, not_understood, plain

if TYPE_CHECKING:
    import torch

    from shardviz.dump.records.base import Role

WORLD = "default_pg"
"""The name of the group of all ranks, whatever a mesh calls its axis."""


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return a plain tensor with the claim of its annotation; None for one without."""
    kinds = _kinds(tensor)
    if not kinds:
        return None
    dims = {axis: dim for dim, axes in enumerate(_spec(tensor)) for axis in axes}
    bare = [axis for axis, kind in kinds.items() if kind == "V" and axis not in dims]
    if bare:
        why = f"its layout: spmd_types has it vary along {_name(bare[0])} and does not say which dim is split"
        return not_understood(name, role, tensor, why)
    on = mesh if mesh is not None and all(_axes_along(axis, mesh) for axis in kinds) else _own_mesh(list(kinds))
    if on is None:
        axes = ", ".join(map(_name, kinds))
        why = f"its layout: its axes in spmd_types, {axes}, do not make a grid of all ranks"
        return not_understood(name, role, tensor, why)
    placements: dict[str, Placement] = {}
    shape = list(tensor.shape)
    for axis, kind in kinds.items():
        placement = Shard(dims[axis]) if kind == "V" else Partial("sum") if kind == "P" else Replicate()
        placements |= dict.fromkeys(_axes_along(axis, on), placement)
        if kind == "V":
            shape[dims[axis]] *= axis.size()
    if not _is_in_order(tensor, on):
        return not_understood(name, role, tensor, "its layout: spmd_types splits a dim over axes that are not in order")
    local = plain(name, role, tensor)
    claim = on, tuple(placements.get(axis, Replicate()) for axis in on.axes)
    return Local(name, role, tuple(shape), local.values, claim, grad=local.grad)


def marks(tensor: torch.Tensor) -> bool:
    """Whether a tensor is annotated as one that ranks hold different parts of."""
    return "V" in _kinds(tensor).values()


def groups_of(model: nn.Module) -> dict[str, Any]:
    """Return the process groups of the axes that a model's annotations name, outermost first."""
    axes = {axis for _, _, tensor in named_tensors(model) for axis in _kinds(tensor)}
    axis_of_group = getattr(sys.modules.get("spmd_types._mesh_axis"), "_pg_to_mesh_axis", {})
    groups = {axis: group for group, axis in list(axis_of_group.items()) if axis in axes}
    finest = [axis for axis in groups if not any(finer < axis for finer in groups)]
    return {_name(axis): groups[axis] for axis in sorted(finest, key=_stride, reverse=True)}


def _kinds(tensor: torch.Tensor) -> dict[Any, str]:
    """Return what a tensor is along each axis of more than one rank: R, I, V or P."""
    local_types = getattr(tensor, "_local_type", None)
    if not isinstance(local_types, dict):
        return {}
    return {axis: kind.value for axis, kind in local_types.items() if hasattr(axis, "layout") and axis.size() > 1}


def _spec(tensor: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return the axes that split each dim, outermost first."""
    spec = getattr(tensor, "_partition_spec", None) or ()
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in spec]


def _is_in_order(tensor: torch.Tensor, mesh: Mesh) -> bool:
    """Whether axes that split one dim are in the order of the mesh, in which placements split."""
    for axes in _spec(tensor):
        columns = [mesh.axis_index(name) for axis in axes if axis.size() > 1 for name in _axes_along(axis, mesh)]
        if columns != sorted(columns):
            return False
    return True


def _axes_along(axis: Any, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that an annotation's axis runs along, outermost first, if any."""
    return mesh.axes_along(_ranks(axis))


def _ranks(axis: Any) -> tuple[int, ...]:
    """Return the ranks of the axis's group that begins at rank 0."""
    return tuple(axis.layout.all_ranks_from_zero())


def _own_mesh(axes: list[Any]) -> Mesh | None:
    """Return the mesh that axes make by themselves; None if they are not a grid of all ranks."""
    world = distributed.get_world_size()
    finest = sorted((axis for axis in axes if not any(finer < axis for finer in axes)), key=_stride, reverse=True)
    shape = tuple(axis.size() for axis in finest)
    ranks = np.zeros(shape, int)
    for column, axis in enumerate(finest):
        ranks += np.array(_ranks(axis)).reshape([-1 if dim == column else 1 for dim in range(len(finest))])
    if math.prod(shape) != world or sorted(ranks.ravel().tolist()) != list(range(world)):
        return None
    return Mesh(tuple(map(_name, finest)), shape, tuple(ranks.ravel().tolist()))


def _stride(axis: Any) -> int:
    return _ranks(axis)[1]


def _name(axis: Any) -> str:
    """Return an axis's name: that of its process group, or of a device mesh, or its stride."""
    names = (name.removeprefix("mesh_") for name in axis.names if name != WORLD)
    group_name = min(names, key=lambda name: (len(name), name), default="")
    return group_name or _name_in_a_mesh(_ranks(axis)) or f"stride{_stride(axis)}"


def _name_in_a_mesh(ranks: tuple[int, ...]) -> str:
    """Return the job's device meshes' name for the axis of these ranks; empty if there is none."""
    meshes = (
        device_mesh
        for device_mesh in gc.get_objects()
        if issubclass(type(device_mesh), DeviceMesh) and device_mesh.mesh_dim_names
    )
    plain_meshes = {plain_mesh(device_mesh) for device_mesh in meshes}
    return min((name for mesh in plain_meshes for name in mesh.axes if ranks in mesh.groups(name)), default="")
