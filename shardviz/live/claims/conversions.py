"""Tensors that a loader makes from a reference's, converted when they are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardviz.live.capture.stamp import bits_of_tensor, from_bits
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shardviz.layout.region import Region
    from shardviz.reference.files import Entry


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of the model that a loader makes of one or more tensors of a file.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        make: Returns it; asked whenever it is compared, so that no more than one is in memory.
    """

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def bits(self) -> NDArray[Any]:
        """Its bits as unsigned integers."""
        return bits_of_tensor(self.make()).reshape(self.shape)

    def read(self, region: Region) -> NDArray[Any]:
        """Return the bits of a part, in the region's order."""
        return part_of(self.bits, region)


def outline(entry: Entry) -> torch.Tensor:
    """Return a tensor of a reference without its values."""
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")


def values_of(entry: Entry) -> torch.Tensor:
    """Return a tensor of a reference, in memory."""
    return from_bits(entry.bits, getattr(torch, entry.dtype))
