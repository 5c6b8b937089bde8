"""Tensor subclasses that wrap tensors: torchao's quantized weights, float8 and others.

Their elements are in inner tensors, in a form that only the class knows, so that neither their bits nor their order say
anything. They are named, and what is not understood is never called wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from shardviz.live.claims.local import Local, not_understood
from shardviz.live.compat import has_storage

if TYPE_CHECKING:
    import torch

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return a tensor of a class that holds its elements elsewhere, as not understood."""
    why = reason_of(tensor)
    return not_understood(name, role, tensor, why) if why else None


def reason_of(tensor: torch.Tensor) -> str:
    """Return why a tensor's elements cannot be read; empty if they can."""
    if isinstance(tensor, DTensor) or has_storage(tensor):
        return ""
    kind = type(tensor)
    inner = getattr(tensor, "__tensor_flatten__", None)
    parts = list(inner()[0]) if callable(inner) else []
    where = f", which keeps them in {', '.join(parts)}" if parts else ", which has no storage"
    of = (
        f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" if kind.__module__ != "torch" else f"{tensor.layout}"
    )
    return f"its elements: it is a {of}{where}"
