"""What `--stamp` writes into memory: stamps over what `torch.load` returned, poison over what a load has yet to write.

Pickled checkpoints are never written again. Memory is used again: without poison, a tensor that was never loaded may by
chance be where a loaded one was before, and a model that is loaded twice has the first load's values where the second
one never happened.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardviz.live.capture.stamp import dtype_name, from_bits
from shardviz.live.run.known.sources import tensors_in
from shardviz.stamping.copies import is_weight
from shardviz.stamping.fill import Fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

POISON_INT8 = -128
"""No fill has it: those of bytes are from 1."""


def filled(loaded: Any, salt: str) -> dict[str, Fill]:
    """Exchange the weights in nested dicts, or of a module, for stamped ones; the memory that they were in is kept.

    A bare tensor is not a checkpoint, and stays; so do integers, as in a copy on disk.

    Args:
        loaded: What a file had.
        salt: Tells fills of files apart.

    Returns:
        The fills, by the tensors' names: the keys that lead to them.
    """
    fills: dict[str, Fill] = {}
    by_memory: dict[Any, tuple[Fill, torch.Tensor]] = {}
    for name, tensor, put in list(_weights(loaded, "")):
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if memory not in by_memory:
            fill = Fill(name, tuple(tensor.shape), dtype_name(tensor.dtype), salt)
            by_memory[memory] = fill, from_bits(fill.bits, tensor.dtype).to(tensor.device)
        fills[name], stamped = by_memory[memory]
        put(stamped)
    return fills


def _weights(value: Any, before: str) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Yield each weight with its name, and what puts another one in its place."""
    if isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            if _is_stampable(tensor):
                yield before + name, tensor, partial(setattr, tensor, "data")
    elif isinstance(value, dict):
        for key, child in value.items():
            if not _is_stampable(child):
                yield from _weights(child, f"{before}{key}.")
            elif isinstance(child, nn.Parameter):
                yield f"{before}{key}", child, partial(setattr, child, "data")
            else:
                yield f"{before}{key}", child, partial(value.__setitem__, key)
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            if not isinstance(child, torch.Tensor):
                yield from _weights(child, f"{before}{number}." if before else "")


def _is_stampable(weight: Any) -> bool:
    is_plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout == torch.strided
    return is_plain and not weight.is_meta and is_weight(dtype_name(weight.dtype))


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
    poison(one for name, one in tensors_in(state_dict) if name in known)


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if local.is_meta else local.untyped_storage().data_ptr()
