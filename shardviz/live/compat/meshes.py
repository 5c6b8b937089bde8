"""DeviceMesh, placements and how DTensor redistributes."""

from __future__ import annotations

import logging
import math
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard

from shardviz.layout import placements
from shardviz.live.compat.modules import followed, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


ORDERS = {"sum": 1.0, "max": math.inf}
"""The norm that a reduction of norms is, by its op."""


def placement_of(placement: Any) -> placements.Placement:
    """Return one of torch's placements as a plain value.

    `_StridedShard`, a private name, is a subclass of `Shard` in torch 2.6.0 and a separate class in 2.13.0 and 2.15.0,
    so it is tested first.

    Raises:
        TypeError: The placement is of an unknown kind.
    """
    if hasattr(placement, "split_factor"):
        return placements.StridedShard(placement.dim, int(placement.split_factor))
    if placement.is_replicate():
        return placements.Replicate()
    if placement.is_partial():
        return placements.Partial(str(placement.reduce_op))
    if placement.is_shard():
        return placements.Shard(placement.dim)
    raise TypeError(f"unknown placement {placement!r}")


def parts_of_norm(norm: DTensor) -> tuple[tuple[int, ...], float] | None:
    """Return the ranks whose local norms make a norm, and its order; no ranks if it is whole; None if not known.

    The placement of a norm of shards is `_NormPartial`, whose order is its `norm_type`, in torch 2.6.0 to 2.15.0.
    """
    mesh, coordinate = norm.device_mesh, norm.device_mesh.get_coordinate()
    pending = {at: placement for at, placement in enumerate(norm.placements) if isinstance(placement, Partial)}
    if coordinate is None or not pending:
        return ((), 2.0) if coordinate is not None else None
    orders = {getattr(placement, "norm_type", ORDERS.get(placement.reduce_op)) for placement in pending.values()}
    order = orders.pop()
    if orders or order is None:
        return None
    index = tuple(slice(None) if at in pending else coordinate[at] for at in range(mesh.ndim))
    return tuple(mesh.mesh[index].flatten().tolist()), float(order)


def torch_placement(placement: placements.Placement) -> Any:
    """Return a placement as torch's own. `_StridedShard`, in torch 2.6.0 to 2.15.0."""
    if isinstance(placement, placements.StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, placements.Shard):
        return Shard(placement.dim)
    return Partial(placement.op) if isinstance(placement, placements.Partial) else Replicate()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a sub-mesh was sliced or flattened from, or the mesh itself if that says as much.

    A mesh of all ranks that was unflattened from a root of fewer axes, or of one, has the names that the job uses
    (torchtitan's `fsdp` of a root `world`). Otherwise weights on the whole mesh would have other names for its axes
    than those on a part of it (accelerate's `dp_shard`, flattened to `dp_shard_cp` before FSDP2 joins it with `tp`).
    """
    root = _root_mesh(mesh)
    return root if (root.size(), root.ndim, root.ndim > 1) > (mesh.size(), mesh.ndim, False) else mesh


def _root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return torch's root: `_get_root_mesh` in 2.13.0 and 2.15.0; `_mesh_resources.get_root_mesh` in 2.6.0."""
    if hasattr(mesh, "_get_root_mesh"):
        newer: DeviceMesh = mesh._get_root_mesh()
        return newer
    from torch.distributed import device_mesh

    resources: Any = device_mesh._mesh_resources
    root: DeviceMesh = resources.get_root_mesh(mesh)
    return root


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Flatten a mesh's axes into one, which torch may then use to merge collectives.

    Calls `DeviceMesh._flatten`, tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    flat: DeviceMesh = mesh._flatten()
    return flat


@contextmanager
def quiet_redistribution() -> Iterator[None]:
    """Silence torch's advice on slow redistributions during those that shardviz itself runs.

    The logger's name is private, tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def working_out_shapes() -> AbstractContextManager[Callable[[], bool]]:
    """Yield a function that says if DTensor runs an operator only to learn a result's shape.

    It runs it on tensors of the whole shape, without values: `ShardingPropagator._propagate_tensor_meta_non_cached`, in
    torch 2.6.0 to 2.15.0; if it has a different name, the answer is always no.
    """
    return followed(_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_non_cached")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local part without waiting for it or recording it for autograd.

    Any other tensor is returned as it is.

    `DTensor._local_tensor` in torch 2.6.0 to 2.15.0.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor put together from all ranks, with pending sums made; any other tensor as it is."""
    with quiet_redistribution():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def norms_reduced_first() -> Iterator[None]:
    """Make `clip_grad_norm_` reduce a DTensor's norm before it adds its small constant, as a step of one rank does.

    Torch before 2.13.0 adds it on every rank, so that what it clips is off by a millionth. `_clip_grads_with_norm_`,
    tried on torch 2.6.0; torch 2.13.0 and 2.15.0 reduce the norm themselves.
    """
    version: Any = torch.__version__
    if version >= (2, 13):
        yield
        return
    clip_grad: Any = sys.modules["torch.nn.utils.clip_grad"]
    before = clip_grad._clip_grads_with_norm_

    def clip(parameters: Any, max_norm: float, norm: Any, *how: Any) -> None:
        if isinstance(norm, DTensor):
            norm = norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)
        before(parameters, max_norm, norm, *how)

    with replaced(clip_grad, "_clip_grads_with_norm_", clip):
        yield


@contextmanager
def meshes_joined_once() -> Iterator[None]:
    """Make FSDP2 over tensor parallel join its two meshes once instead of per parameter.

    That saves a quarter of its time.

    `DeviceMesh._concatenate`, tried on torch 2.13.0 and 2.15.0; 2.6.0 has none.
    """
    before: Any = getattr(DeviceMesh, "_concatenate", None)
    joined: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}  # with the meshes, which keep their ids

    def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(map(id, meshes))
        if key not in joined:
            joined[key] = meshes, before(meshes)
        return joined[key][1]

    with nullcontext() if before is None else replaced(DeviceMesh, "_concatenate", staticmethod(concatenate)):
        yield
