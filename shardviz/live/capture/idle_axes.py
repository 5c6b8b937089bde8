"""The mesh of a job that does not say it, and the axes of it that split no tensor.

The mesh is the one that the model's tensors are on, or that its engine's groups make. What shards over an axis that
splits nothing may never have been called. An axis over which gradients are averaged has copies by design, as do
sequence and pipeline axes: those of DDP, of HSDP's own mesh, and those that are named so. They are not reported.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from torch import distributed, nn
from torch.distributed.tensor import DTensor

from shardviz.errors import MeshError
from shardviz.layout.placements import Shard, StridedShard
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.meshes import over_groups, plain_mesh
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims import registry
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh
    from shardviz.live.claims.local import Local

ORDINARY = re.compile(
    r"(?!.*shard)(d?dp|data|batch|repl|hsdp|pp|pipe|stage|cp|sp|seq|context|ring|ulysses|world|dim\d)"
)
"""Names of axes along which every rank has all weights, or other layers."""

SHARDING = re.compile(r"shard|fsdp")
"""Names of axes that are reported even if nothing is split: other weights may be cut by hand, without a label."""


def idle_axes(
    model: nn.Module,
    mesh: Mesh,
    locals_: Iterable[Local],
    shapes: Mapping[str, tuple[int, ...]],
    ordinary: Collection[str] = (),
) -> list[str]:
    """Return the axes of a mesh that split no tensor and aren't meant for replicas.

    Args:
        shapes: The shapes of the unsharded model's tensors, as far as they are known, by name.
        ordinary: Axes that are known to split none.
    """
    rank = distributed.get_rank()
    if rank not in mesh:
        return []
    locals_ = list(locals_)
    if any(local.unknown or _is_cut_by_hand(local, shapes.get(local.name)) for local in locals_):
        return []  # something is cut in a way that has no layout
    split = list(_splitting(locals_, rank))
    explained = [*split, *_replica_groups(model, rank)]
    return [
        axis
        for axis in mesh.long_axes
        if axis not in ordinary
        and not ORDINARY.match(axis)
        and (split or SHARDING.search(axis))
        and not any(set(mesh.group_of(rank, axis)) <= group for group in explained)
    ]


def _is_cut_by_hand(local: Local, whole: tuple[int, ...] | None) -> bool:
    """Whether a plain tensor is a part, or a DTensor is the part that its own mesh splits."""
    if local.claim is None:
        return tuple(local.values.shape) != local.shape
    return bool(local.own_axes) and whole is not None and math.prod(local.shape) < math.prod(whole)


def notes_on(axes: Sequence[str], mesh: Mesh) -> list[tuple[str, str]]:
    """Return a note on each idle axis, as a dump has them."""
    why = "no tensor of the model is labeled as split along this axis"
    return [("", f"what shards over {axis}={mesh.axis_size(axis)}: {why}") for axis in axes]


def _splitting(locals_: Iterable[Local], rank: int) -> Iterator[set[int]]:
    """Yield the groups over which some tensor is split."""
    for on, placements in {local.claim for local in locals_ if local.claim is not None}:
        for axis, placement in zip(on.axes, placements, strict=True) if rank in on else ():
            if isinstance(placement, Shard | StridedShard):
                yield set(on.group_of(rank, axis))


def _replica_groups(model: nn.Module, rank: int) -> Iterator[set[int]]:
    """Yield groups along which replicas are a choice: tensors' own meshes, DDP, engines."""
    for device_mesh in {tensor.device_mesh for _, _, tensor in named_tensors(model) if isinstance(tensor, DTensor)}:
        tensor_mesh = plain_mesh(device_mesh)
        yield from (set(tensor_mesh.group_of(rank, axis)) for axis in tensor_mesh.axes if rank in tensor_mesh)
    for group in registry.groups_of(model).values():
        yield set(distributed.get_process_group_ranks(group))


HINT = "pass the mesh of the whole job: shardviz.capture(..., mesh=mesh)"


def found_mesh(model: nn.Module) -> DeviceMesh:
    """Return the largest mesh that a model's tensors show. Every rank calls this.

    A sub-mesh counts as its root.

    Raises:
        MeshError: Some rank has no tensor that shows one, or ranks are on different meshes; every rank raises it.
    """
    device_mesh, groups = registry.mesh_of(model), registry.groups_of(model)
    coords = of_all_ranks({axis: group.rank() for axis, group in groups.items()})
    device_mesh = device_mesh if device_mesh is not None else over_groups(groups, coords)
    of_all = of_all_ranks(plain_mesh(device_mesh) if device_mesh is not None else None)
    without = [rank for rank, mesh in enumerate(of_all) if mesh is None]
    if len(without) == len(of_all):
        raise MeshError("no mesh was given, and no parameter or buffer is a DTensor, which would show one", HINT)
    if without:
        raise MeshError(f"no mesh was given, and there is no DTensor on ranks {listed(without, 4)} to show one", HINT)
    if len(set(of_all)) > 1:
        odd_rank = next(rank for rank, mesh in enumerate(of_all) if mesh != of_all[0])
        raise MeshError(
            f"no mesh was given, and ranks are on different ones: rank 0 on {_mesh_text(of_all[0])}, "
            f"rank {odd_rank} on {_mesh_text(of_all[odd_rank])}",
            HINT,
        )
    assert device_mesh is not None
    return device_mesh


def _mesh_text(mesh: Mesh | None) -> str:
    return f"{mesh} of ranks {listed(mesh.ranks, 4)}" if mesh is not None else "none"
