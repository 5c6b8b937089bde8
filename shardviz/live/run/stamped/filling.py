"""Stamps what `torch.load` returned, in memory: pickled checkpoints are never written again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardviz.live.capture.stamp import dtype_name, from_bits
from shardviz.stamping.fill import Fill
from shardviz.stamping.plan import is_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
        for key, one in value.items():
            if not _is_stampable(one):
                yield from _weights(one, f"{before}{key}.")
            elif isinstance(one, nn.Parameter):
                yield f"{before}{key}", one, partial(setattr, one, "data")
            else:
                yield f"{before}{key}", one, partial(value.__setitem__, key)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            if not isinstance(one, torch.Tensor):
                yield from _weights(one, f"{before}{number}." if before else "")


def _is_stampable(one: Any) -> bool:
    is_plain = type(one) in (torch.Tensor, nn.Parameter) and one.layout == torch.strided
    return is_plain and not one.is_meta and is_weight(dtype_name(one.dtype))
