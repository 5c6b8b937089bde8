"""torch's device meshes as shardviz's, sub-meshes described on their shared root."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Placement, Replicate, Shard
from shardviz.live.compat.meshes import root_mesh
from shardviz.live.compat.tensors import real_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardviz.live.claims.local import FlatParam

_plain: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()
"""Meshes as shardviz's: a mesh of thousands of ranks is asked for once for every parameter."""

Claim = tuple[Mesh, tuple[Placement, ...]]
"""Placements, one for each axis of a mesh."""


def plain_mesh(mesh: DeviceMesh) -> Mesh:
    """Return a device mesh as axes, shape and ranks; unnamed axes become `dim0`, `dim1`, ..."""
    if mesh not in _plain:
        with real_tensors():
            grid = mesh.mesh
            names = mesh.mesh_dim_names or tuple(f"dim{index}" for index in range(grid.ndim))
            _plain[mesh] = Mesh(tuple(names), tuple(grid.shape), tuple(grid.flatten().tolist()))
    return _plain[mesh]


def over_groups(groups: Mapping[str, ProcessGroup], coords: Sequence[Mapping[str, int]]) -> DeviceMesh | None:
    """Return a mesh over existing process groups; None if the ranks' places are not a grid.

    Args:
        groups: This rank's group along each axis, outermost first.
        coords: Every rank's place in its groups, by axis, in rank order.
    """
    grid = torch.full(tuple(group.size() for group in groups.values()), -1)
    for rank, at in enumerate(coords):
        if tuple(at) == tuple(groups) and all(
            index < size for index, size in zip(at.values(), grid.shape, strict=True)
        ):
            grid[tuple(at.values())] = rank
    ranks = grid.flatten().tolist()
    if not groups or len(set(ranks)) < len(ranks) or -1 in ranks:
        return None
    group_list = list(groups.values())
    kind = "cuda" if "nccl" in distributed.get_backend(group_list[0]) else "cpu"
    if len(group_list) == 1:
        return DeviceMesh.from_group(group_list[0], kind, mesh_dim_names=tuple(groups))
    return DeviceMesh.from_group(group_list, kind, grid, mesh_dim_names=tuple(groups))


def on_root(mesh: DeviceMesh, placements: Sequence[Placement]) -> Claim:
    """Spell a sub-mesh's placements on its root, with replicas along the axes it lacks.

    A flattened axis keeps its name; the root's ranks are regrouped so that it is one of the axes.
    """
    sub_mesh, root = plain_mesh(mesh), plain_mesh(root_mesh(mesh))
    if sub_mesh == root:
        return sub_mesh, tuple(placements)
    parts = [_root_axes(sub_mesh, axis, root) for axis in sub_mesh.axes]
    if not all(parts):
        return sub_mesh, tuple(placements)
    used = {axis for axes in parts for axis in axes}
    free_axes = [axis for axis in root.axes if axis not in used]
    if all(len(axes) == 1 for axes in parts):
        by_axis = {axes[0]: placement for axes, placement in zip(parts, placements, strict=True)}
        if [axis for axis in root.axes if axis in used] == [axes[0] for axes in parts]:
            return root, tuple(by_axis.get(axis, Replicate()) for axis in root.axes)
    return _regrouped(root, free_axes, parts, sub_mesh), (*(Replicate() for _ in free_axes), *placements)


def own_axes(device_mesh: DeviceMesh, mesh: Mesh) -> tuple[str, ...]:
    """Return a larger mesh's axes that a device mesh runs along; empty if it is as large.

    Args:
        device_mesh: A tensor's own mesh.
        mesh: The mesh that its claim is spelled on.
    """
    return _own_axes(plain_mesh(device_mesh), mesh)


@lru_cache(maxsize=64)
def _own_axes(sub_mesh: Mesh, mesh: Mesh) -> tuple[str, ...]:
    axes = []
    for axis in sub_mesh.axes:
        group, named = sub_mesh.groups(axis)[0], (axis, *mesh.axes)  # single ranks run along several
        axes.append(next((name for name in named if name in mesh.axes and group in mesh.groups(name)), ""))
    return tuple(axes) if len(axes) < mesh.ndim and all(axes) and len(set(axes)) == len(axes) else ()


def without_axes(claim: Claim, axes: Sequence[str], rank: int) -> Claim:
    """Drop axes from a claim, which leaves the sub-mesh at the rank's coordinates on them.

    Args:
        claim: Returned unchanged unless it is Replicate along every axis to drop.
        axes: Names of axes to drop; names that the claim's mesh does not have are ignored.
    """
    mesh, placements = claim
    kept_axes = tuple(axis for axis in mesh.axes if axis not in axes)
    by_axis = dict(zip(mesh.axes, placements, strict=True))
    if len(kept_axes) == mesh.ndim or any(by_axis[axis] != Replicate() for axis in mesh.axes if axis not in kept_axes):
        return claim
    return _sub_mesh(mesh, kept_axes, rank), tuple(by_axis[axis] for axis in kept_axes)


@lru_cache(maxsize=64)
def _sub_mesh(mesh: Mesh, axes: tuple[str, ...], rank: int) -> Mesh:
    """Return the part of a mesh along some of its axes that a rank is in."""
    return Mesh(axes, tuple(map(mesh.axis_size, axes)), mesh.group_of(rank, *axes))


def _root_axes(sub_mesh: Mesh, axis: str, root: Mesh) -> tuple[str, ...]:
    """Return the root's axes that one axis of a sub-mesh runs along, outermost first; none if it runs along none."""
    return (axis,) if axis in root.axes else root.axes_along(sub_mesh.groups(axis)[0])


def _regrouped(root: Mesh, free_axes: list[str], parts: list[tuple[str, ...]], sub_mesh: Mesh) -> Mesh:
    order = [root.axis_index(axis) for axis in [*free_axes, *(axis for axes in parts for axis in axes)]]
    grid = np.array(root.ranks).reshape(root.shape).transpose(order)
    shape = (*(root.axis_size(axis) for axis in free_axes), *sub_mesh.shape)
    return Mesh((*free_axes, *sub_mesh.axes), shape, tuple(grid.ravel().tolist()))


def of_flat_param(param: FlatParam, mesh: Mesh | None, axis: str = "fsdp") -> Claim:
    """Return the claim of FSDP1's flat parameter: split over its shard group, else replicated.

    Args:
        mesh: The run's mesh, whose axes give the groups their names if they fit.
        axis: What the shard group is called if none does.
    """
    split, copied = param.shard_ranks, param.replicate_ranks
    if mesh is not None:
        for named in mesh.axes:
            others_agree = len(copied) == 1 or any(
                copied in mesh.groups(other) for other in mesh.axes if other != named
            )
            if split in mesh.groups(named) and others_agree:
                return mesh, tuple(Shard(0) if named == name else Replicate() for name in mesh.axes)
        if len(split) == 1 and len(copied) == mesh.size:
            return mesh, (Replicate(),) * mesh.ndim
        if split == mesh.ranks and mesh.ndim > 1:
            return Mesh(("_".join(mesh.axes),), (mesh.size,), mesh.ranks), (Shard(0),)
    if len(split) == 1:
        return Mesh(("replicate",), (len(copied),), copied), (Replicate(),)
    return Mesh((axis,), (len(split),), split), (Shard(0),)
