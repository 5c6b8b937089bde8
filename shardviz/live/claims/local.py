"""One tensor as a rank has it, whatever library split it, and its claim.

Beside it, a parameter inside the flat, split parameter of FSDP1 or DeepSpeed's ZeRO-3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardviz.dump.records.base import Role
    from shardviz.dump.records.tensors import FlatRecord
    from shardviz.live.capture.meshes import Claim


@dataclass(frozen=True)
class Local:
    """One tensor as this rank has it.

    Attributes:
        values: This rank's part, plain and detached; on the meta device if it cannot be read.
        claim: Its mesh and placements; None for a plain tensor.
        flat: Its place in FSDP1's concatenation, with that concatenation's length.
        grad: This rank's part of `.grad`, if there is one.
        grad_claim: The gradient's own mesh and placements, if it is a DTensor.
        own_axes: The axes of the claim's mesh that its own device mesh has; empty if that has all of them.
        assumed: Whether nothing claims these placements: they are those that a plain output should have.
        unknown: Why its elements or their places are not understood; empty if they are.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    values: torch.Tensor
    claim: Claim | None = None
    flat: tuple[FlatRecord, int] | None = None
    grad: torch.Tensor | None = None
    grad_claim: Claim | None = None
    unknown: str = ""
    own_axes: tuple[str, ...] = ()
    assumed: bool = False

    @property
    def claimed_shape(self) -> tuple[int, ...]:
        """The shape that the placements refer to: FSDP1's concatenation, or the global shape."""
        return (self.flat[1],) if self.flat else self.shape

    def placed_as(self, parameter: Local | None) -> Local:
        """Return an optimizer's state with the placements of its parameter, if it has none and is as large here."""
        if parameter is None or self.claim or self.flat or self.values.shape != parameter.values.shape:
            return self
        return replace(self, shape=parameter.shape, claim=parameter.claim, flat=parameter.flat)

    @property
    def is_constant(self) -> bool:
        """Whether it has elements, and all are one number."""
        return bool(self.values.numel() and (self.values == self.values.flatten()[0]).all())


def as_part(local: Local, shapes: Mapping[str, tuple[int, ...]], roles: Collection[str] = ("buffer",)) -> Local:
    """Return a plain tensor that may be a part of what it was before sharding with the shape of the whole.

    Args:
        shapes: Shapes before sharding by name.
        roles: The roles of tensors that may be parts.
    """
    shape = shapes.get(local.name, local.shape)
    is_plain = local.role in roles and local.claim is None and local.flat is None
    is_part = len(shape) == len(local.shape) and all(map(int.__le__, local.shape, shape))
    return replace(local, shape=shape) if is_plain and is_part else local


MAX_DENSE = 1 << 26
"""Elements of a sparse gradient that is made dense; of a larger one, whose table fits only so, nothing is kept."""


def plain(name: str, role: Role, tensor: torch.Tensor) -> Local:
    """Return a tensor that claims nothing; a sparse gradient, as of an embedding, is made dense."""
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None and grad.is_sparse and grad.numel() > MAX_DENSE:
        grad = None
    dense = None if grad is None else grad.detach().to_dense()
    return Local(name, role, tuple(tensor.shape), tensor.detach(), grad=dense)


def not_understood(name: str, role: Role, tensor: torch.Tensor, why: str) -> Local:
    """Return a tensor known by its name, its shape and its dtype alone.

    Args:
        why: What is not understood, with the name of the class or the library.
    """
    shape = tuple(tensor.shape)
    return Local(name, role, shape, torch.empty(shape, dtype=tensor.dtype, device="meta"), unknown=why)


@dataclass(frozen=True)
class FlatParam:
    """One original parameter inside one of FSDP1's flat parameters.

    Attributes:
        name: Its fully qualified name in the unwrapped model.
        unit: The name of the wrapped module whose flat parameter contains it.
        shape: Its own shape; for a tensor-parallel one, the shape of the shard in the concatenation.
        whole: Its global shape.
        offset: Its first element in the concatenation.
        total: The number of elements of the whole concatenation, including padding.
        local: This rank's part of the concatenation, one-dimensional.
        local_start: The first element of that part.
        shard_ranks: The ranks that the concatenation is split over.
        replicate_ranks: The ranks that hold the same part; only this rank if nothing is replicated.
        grad: This rank's part of the gradient, if there is one.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offset: int
    total: int
    local: torch.Tensor
    local_start: int
    shard_ranks: tuple[int, ...]
    replicate_ranks: tuple[int, ...]
    grad: torch.Tensor | None

    @classmethod
    def in_buffers(
        cls, name: str, shape: tuple[int, ...], ranks: tuple[int, ...], local: torch.Tensor, size: int, offset: int = 0
    ) -> FlatParam:
        """Return a parameter in the buffers of some ranks, laid end to end: this rank's has so many elements."""
        rank = distributed.get_rank()
        place = size * len(ranks), local, size * ranks.index(rank), ranks, (rank,)
        return cls(name, "", shape, shape, offset, *place, None)

    def cut(self, local: torch.Tensor) -> torch.Tensor:
        """Return this parameter's own stretch of a local part of the concatenation."""
        begin = max(self.offset - self.local_start, 0)
        end = max(self.offset + math.prod(self.shape) - self.local_start, 0)
        return local[min(begin, len(local)) : min(end, len(local))]
