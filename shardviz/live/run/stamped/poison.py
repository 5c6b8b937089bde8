"""Marks memory that a load has yet to write: without it, a stamped value left there would pass for a loaded one.

Memory is used again: a tensor that was never loaded may by chance be where a loaded one was before, and a model that
is loaded twice has the first load's values where the second one never happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardviz.live.capture.stamp import dtype_name
from shardviz.stamping.plan import is_weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

POISON_INT8 = -128
"""No fill has it: those of bytes are from 1."""


def poison(tensors: Iterable[Any]) -> None:
    """Write over tensors what no fill has: NaN, or the lowest byte. Others than weights stay as they are."""
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and not local.is_meta and is_weight(dtype_name(local.dtype)):
                local.detach().fill_(float("nan") if local.is_floating_point() else POISON_INT8)


def poison_module(module: nn.Module) -> None:
    """Poison all weights of a module, which was just given memory that nobody wrote to."""
    poison((*module.parameters(), *module.buffers()))


def poison_loaded(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Poison what a module is about to load, unless it is what it is loaded from."""
    sources = {_storage(value) for value in state_dict.values() if isinstance(value, torch.Tensor)}
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    poison(one for name, one in own.items() if name in state_dict and _storage(one) not in sources)


def poison_state(state_dict: Mapping[str, Any], names: Iterable[str]) -> None:
    """Poison the tensors of a nested state dict that are about to be loaded in place.

    Args:
        state_dict: What is loaded into.
        names: The names that the checkpoint has.
    """
    known = set(names)
    poison(one for name, one in _named(state_dict, "") if name in known)


def _named(nested: Any, before: str) -> Iterator[tuple[str, torch.Tensor]]:
    pairs = (
        nested.items() if isinstance(nested, dict) else enumerate(nested) if isinstance(nested, list | tuple) else ()
    )
    for key, one in pairs:
        if isinstance(one, torch.Tensor):
            yield f"{before}{key}", one
        else:
            yield from _named(one, f"{before}{key}.")


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if local.is_meta else local.untyped_storage().data_ptr()
