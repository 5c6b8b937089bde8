"""A model's tensors on this rank: plain and detached, each with its claimed placements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FullyShardedDataParallel

from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims import registry
from shardviz.live.claims.local import Local
from shardviz.live.claims.registry import of_tensor, unwrapped
from shardviz.live.compat.fsdp import held_back
from shardviz.live.compat.modules import clean_name, unit_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from shardviz.layout.mesh import Mesh

__all__ = ["Local", "local_tensors", "name_of", "of_tensor", "unwrapped"]


def local_tensors(model: nn.Module, mesh: Mesh | None = None) -> Iterator[Local]:
    """Yield a model's parameters and buffers, as described by the library that split each.

    Args:
        mesh: The run's mesh, whose axes give the libraries' groups their names.
    """
    done, names = set(), registry.names(model)
    for local in registry.of_model(model, mesh):
        done.add(local.name)
        yield replace(local, name=names.get(local.name, local.name))
    for role, name, tensor in named_tensors(model):
        cleaned = clean_name(name)
        if cleaned not in done and unit_of(name) is None:
            yield of_tensor(names.get(cleaned, cleaned), role, tensor, mesh)


def held_back_names(model: nn.Module) -> list[str]:
    """Return the names of parameters whose gradient FSDP2 keeps for a later backward."""
    without = {id(param) for param in held_back(model)}
    return [clean_name(name) for name, param in model.named_parameters() if id(param) in without]


def name_of(root: nn.Module) -> str:
    """Return the name of a model's class as its author wrote it.

    `fully_shard` derives a class of its own from it, `(FSDPModule, cls)` in torch 2.6.0 to 2.15.0.
    """
    inside = unwrapped(root)
    kind = type(inside.module if isinstance(inside, FullyShardedDataParallel) else inside)
    bases = kind.__bases__
    return bases[1].__name__ if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else kind.__name__
