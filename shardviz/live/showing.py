"""torch's objects for `shardviz.show`: a DTensor's placements, a module's layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from shardviz.dump.read import layout_of
from shardviz.dump.records.tensors import LayoutRecord
from shardviz.errors import ShardvizError
from shardviz.layout import notation
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import dtype_name
from shardviz.live.claims.registry import local_tensors, of_tensor
from shardviz.text import did_you_mean

if TYPE_CHECKING:
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.live.claims.local import Local


def rank() -> int | None:
    """Return this process's rank; None if no process group is up."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None


def mesh_of(what: object) -> Mesh | None:
    """Return a device mesh as shardviz's own; None for anything else."""
    return plain_mesh(what) if isinstance(what, DeviceMesh) else None


def claimed_of(what: object, name: str | None) -> tuple[Layout, str, str] | None:
    """Return the layout, dtype and name of a tensor, or of a module's tensor `name`; else None.

    Raises:
        ShardvizError: The tensor is plain, or the module has no tensor of that name.
    """
    if isinstance(what, torch.Tensor):
        return _layout_dtype_name(of_tensor("", "param", what))
    if not isinstance(what, nn.Module) or name is None:
        return None
    tensors = {local.name: local for local in local_tensors(what)}
    if name not in tensors:
        raise ShardvizError(f"the module has no tensor {name!r}", did_you_mean(name, tensors))
    return _layout_dtype_name(tensors[name])


def table_of(what: object) -> list[tuple[str, str]] | None:
    """Return a module's tensors, each with its layout in the notation; else None."""
    return [(local.name, _layout_text(local)) for local in local_tensors(what)] if isinstance(what, nn.Module) else None


def _layout_text(local: Local) -> str:
    layout = _layout(local)
    if layout is None:
        return f"{dtype_name(local.values.dtype)}[{', '.join(map(str, local.shape))}] plain"
    return f"{notation.write(layout, dtype_name(local.values.dtype))}  on mesh {layout.mesh}"


def _layout_dtype_name(local: Local) -> tuple[Layout, str, str]:
    layout = _layout(local)
    if layout is None:
        raise ShardvizError(
            f"{local.name or 'the tensor'} is plain, {list(local.shape)}: it has no placements to draw",
            "show a DTensor, or a dump made by shardviz.capture",
        )
    return layout, dtype_name(local.values.dtype), local.name


def _layout(local: Local) -> Layout | None:
    if local.claim is None:
        return None
    mesh, placements = local.claim
    flat = local.flat[0] if local.flat else None
    return layout_of(LayoutRecord(0, tuple(map(str, placements)), local.claimed_shape, flat), mesh)
