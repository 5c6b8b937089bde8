"""Every tensor and number that one call of a model returned, by its path: `[1]`, `.logits`, `.cache.layers[0].keys`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardviz.live.claims.registry import of_tensor
from shardviz.live.compat.tensors import is_transformed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_DEPTH = 8
"""Containers within containers are followed so deep."""

MAX_TENSORS = 128
"""The first tensors of a call are kept."""

MAX_VISITED = 4096
"""So many containers and objects of one call are looked through."""

LARGEST = sys.float_info.max
"""Python's integers can be larger than this; such a number is not compared."""

MAX_ELEMENTS = 1 << 24
"""Once so many elements of one call are kept, nothing more is."""


@dataclass
class Returned:
    """What one call of a model returned.

    Attributes:
        tensors: Its tensors by path, detached unless asked for as they are; a number counts as a tensor without dims.
            The path of a model's only tensor is empty.
        unread: The classes of objects that have no tensor that could be found, by path.
        num_left_out: How many tensors are not kept, because too much was kept before them.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    num_left_out: int = 0

    @staticmethod
    def safely(output: Any, *, detached: bool = True) -> Returned:
        """Look through what a model returned; if its own code raises on the way, nothing of it is kept."""
        try:
            return Returned.of(output, detached=detached)
        except Exception:  # a mapping's items() or a property is the user's code, and runs in the user's forward
            return Returned(unread={"": type(output).__name__})

    @staticmethod
    def of(output: Any, *, detached: bool = True) -> Returned:
        """Look through what a model returned."""
        returned, num_elements = Returned(), 0
        for path, leaf in _leaves(output, "", (), [MAX_VISITED]):
            if not torch.is_tensor(leaf):
                returned.unread[path] = type(leaf).__name__
            elif len(returned.tensors) == MAX_TENSORS or num_elements > MAX_ELEMENTS:
                returned.num_left_out += 1
            else:
                returned.tensors[path] = leaf.detach() if detached else leaf
                num_elements += leaf.numel() if leaf.layout is torch.strided else 0
        return returned


def _leaves(value: Any, path: str, inside: tuple[int, ...], budget: list[int]) -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers as tensors, and what cannot be looked into, each with its path.

    Args:
        inside: The ids of the containers and objects that it is in; one that is in itself is left out.
        budget: One number: how many more containers and objects are looked through.
    """
    if torch.is_tensor(value):
        yield path, value
    elif isinstance(value, bool | int | float):
        is_too_large = isinstance(value, int) and abs(value) > LARGEST
        yield path, value if is_too_large else torch.tensor(value, dtype=torch.float64)
    elif value is None or id(value) in inside or isinstance(value, str | bytes | torch.dtype | torch.device | type):
        return
    elif len(inside) == MAX_DEPTH or not budget[0]:
        yield path, value
    elif (items := _items(value)) is not None:
        budget[0] -= 1
        for at, element in items:
            yield from _leaves(element, path + at, (*inside, id(value)), budget)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        budget[0] -= 1
        sides = ((f"{path}.{key}", item) for key, item in vars(value).items())
        leaves = (leaf for name, item in sides for leaf in _leaves(item, name, (*inside, id(value)), budget))
        of_object = [leaf for leaf in leaves if torch.is_tensor(leaf[1]) and leaf[1].ndim]
        yield from of_object or [(path, value)]
    else:
        yield path, value


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """Return a container's items with their parts of the path; None for anything else."""
    if isinstance(value, Mapping):
        return [(f".{key}", item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{key}", item) for key, item in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{at}]", item) for at, item in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{one.name}", getattr(value, one.name, None)) for one in fields(value)]
    return None


def is_array(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an array of real numbers with dims, which can be read."""
    is_dense = bool(tensor.ndim) and tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not (tensor.is_complex() or is_transformed(tensor))


def named_calls(calls: Sequence[Returned], runs: int) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that calls returned, by name: one for each micro-batch of every run.

    The only tensor of the last run is left out: it is compared as the model's output.
    """
    by_name: dict[str, list[torch.Tensor]] = {}
    for number in range(runs):
        run = "output" if number == runs - 1 else f"output of call {number + 1}"
        of_run = calls[number::runs]
        for path in dict.fromkeys(path for call in of_run for path in call.tensors):
            tensors = [call.tensors[path] for call in of_run if path in call.tensors]
            if len(tensors) == len(of_run) and not (run == "output" and not path and is_array(tensors[0])):
                by_name[run + path] = tensors
    return by_name


def are_parts_of(calls: Sequence[Returned], rows: int) -> bool:
    """Whether calls returned so many rows in turn: together they have as many, and the last has fewer."""
    if len(calls) < 2:
        return False
    sizes = (
        [len(call.tensors[path]) for call in calls if path in call.tensors]
        for path, tensor in calls[0].tensors.items()
        if tensor.ndim
    )
    return any(own[-1] != rows == sum(own) for own in sizes)


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a tensor as float64 or int64, complex numbers as pairs; None if it has no array."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    local = of_tensor("", "output", tensor).values
    if local.layout is not torch.strided or local.is_meta:
        return None
    local = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    return local.double() if local.is_floating_point() else local.long()


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """Return the values of all parts of a batch; the first part's if they have no such dim; None if shapes differ."""
    if len(parts) < 2:
        return parts[0] if parts else None
    alike = {(part.ndim, part.shape[:dim], part.shape[dim + 1 :]) for part in parts}
    if len(alike) > 1:
        return None
    return torch.cat([*parts], dim) if parts[0].ndim > dim else parts[0]


def is_split(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor of which ranks do not have all."""
    return isinstance(tensor, DTensor) and not all(isinstance(one, Replicate) for one in tensor.placements)
