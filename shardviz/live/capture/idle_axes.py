"""Mesh axes that split no tensor at all: what shards over them may never have been called.

An axis over which gradients are averaged has copies by design, as do sequence and pipeline axes: those of DDP, of
HSDP's own mesh, and those that are named so. They are ordinary, and not reported.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from torch import distributed
from torch.distributed.tensor import DTensor

from shardviz.layout.placements import Shard, StridedShard
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims import registry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from shardviz.layout.mesh import Mesh
    from shardviz.live.claims.local import Local

ORDINARY = re.compile(
    r"(?!.*shard)(d?dp|data|batch|repl|hsdp|pp|pipe|stage|cp|sp|seq|context|ring|ulysses|world|dim\d)"
)
"""Names of axes along which every rank has all weights, or other layers."""

SHARDING = re.compile(r"shard|fsdp")
"""Names of axes that are reported even where nothing is split: other weights may be cut by hand, without a label."""


def idle_axes(
    model: nn.Module,
    mesh: Mesh,
    locals_: Iterable[Local],
    shapes: Mapping[str, tuple[int, ...]],
    ordinary: Collection[str] = (),
) -> list[str]:
    """Return the axes of a mesh that split no tensor, and along which copies are not what somebody asked for.

    Args:
        model: The sharded model, in its wrappers.
        mesh: The job's mesh.
        locals_: This rank's tensors of it.
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
    known = [*split, *_meant(model, rank)]
    return [
        axis
        for axis in mesh.axes
        if mesh.axis_size(axis) > 1
        and axis not in ordinary
        and not ORDINARY.match(axis)
        and (split or SHARDING.search(axis))
        and not any(set(_group(mesh, axis, rank)) <= group for group in known)
    ]


def _is_cut_by_hand(local: Local, whole: tuple[int, ...] | None) -> bool:
    """Whether a plain tensor is a part, or a DTensor is the part that its own mesh splits."""
    if local.claim is None:
        return tuple(local.values.shape) != local.shape
    return bool(local.own_axes) and whole is not None and math.prod(local.shape) < math.prod(whole)


def notes_on(axes: Sequence[str], mesh: Mesh) -> list[tuple[str, str]]:
    """Return a note on each idle axis, as a dump has them."""
    why = "no tensor of the model is labelled as split along this axis"
    return [("", f"what shards over {axis}={mesh.axis_size(axis)}: {why}") for axis in axes]


def _splitting(locals_: Iterable[Local], rank: int) -> Iterator[set[int]]:
    """Yield the groups over which some tensor is split."""
    for on, placements in {local.claim for local in locals_ if local.claim is not None}:
        for axis, placement in zip(on.axes, placements, strict=True) if rank in on else ():
            if isinstance(placement, Shard | StridedShard):
                yield set(_group(on, axis, rank))


def _meant(model: nn.Module, rank: int) -> Iterator[set[int]]:
    """Yield the groups of tensors' own meshes, on which a copy is a choice, and those of DDP and engines."""
    for device_mesh in {tensor.device_mesh for _, _, tensor in named_tensors(model) if isinstance(tensor, DTensor)}:
        own = plain_mesh(device_mesh)
        yield from (set(_group(own, axis, rank)) for axis in own.axes if rank in own)
    for group in registry.groups_of(model).values():
        yield set(distributed.get_process_group_ranks(group))


def _group(mesh: Mesh, axis: str, rank: int) -> Sequence[int]:
    return next(group for group in mesh.groups(axis) if rank in group)
