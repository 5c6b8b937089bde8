"""torch's own reassembly of a sharded tensor, run only on sound shards: gloo aborts the process on misshapen ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed

from shardviz.layout.layout import Layout
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.compat import placement_of, quiet_redistribution

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed.tensor import DTensor

Described = dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]
"""By name: the reason not to gather a rank's tensor, the ranks of its mesh, and the global shape on that rank."""

MAX_ELEMENTS = 1 << 26
"""Tensors with more elements than this are not gathered on every rank."""


def refused(tensors: Mapping[str, DTensor]) -> dict[str, str]:
    """Return the tensors that must not be gathered, with the reason. Every rank calls this and gets the same answer.

    Args:
        tensors: This rank's DTensors by name.
    """
    mine = {
        name: (_reason(tensor), plain_mesh(tensor.device_mesh).ranks, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    of_all = of_all_ranks(mine)
    found = {name: reason for one in reversed(of_all) for name, (reason, _, _) in one.items() if reason}
    return _of_other_shapes(of_all) | found


def _of_other_shapes(of_all: list[Described]) -> dict[str, str]:
    """Return the tensors whose global shape differs between two ranks of one mesh."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
    found: dict[str, str] = {}
    for rank, described in enumerate(of_all):
        for name, (_, ranks, shape) in described.items():
            at, other = first.setdefault((name, ranks), (rank, shape))
            if other != shape:
                found.setdefault(name, f"rank {at} sees shape {list(other)}, rank {rank} sees {list(shape)}")
    return found


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the result of torch's `full_tensor`."""
    with quiet_redistribution():
        full: torch.Tensor = tensor.full_tensor()
    return full.detach()


def _reason(tensor: DTensor) -> str:
    if any(placement.is_partial() for placement in tensor.placements):
        return "a sum is pending"
    if tensor.numel() > MAX_ELEMENTS:
        return f"its {tensor.numel():,} elements exceed the limit of {MAX_ELEMENTS:,}"
    mesh = plain_mesh(tensor.device_mesh)
    rank = distributed.get_rank()
    if rank not in mesh:
        return ""
    claimed = Layout.from_placements(mesh, tuple(tensor.shape), [placement_of(p) for p in tensor.placements])
    wanted, local = claimed.region(mesh.coord_of(rank)).shape, tuple(tensor.to_local().shape)
    if wanted != local:
        return f"rank {rank} has a shard of {list(local)}, but its placements give {list(wanted)}"
    return ""
