"""A parameter inside the flat, split parameter of FSDP1 or DeepSpeed's ZeRO-3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed

if TYPE_CHECKING:
    import torch


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
