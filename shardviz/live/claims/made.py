"""Tensors of a reference that a loader makes of one or more of its own, read when they are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardviz.layout.dtypes import itemsize
from shardviz.reference.lookup import bits_of, read_region

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shardviz.layout.region import Region
    from shardviz.reference.files import Entry

_SIGNED = {1: (np.int8, torch.int8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of the model that a loader makes of one or more tensors of a file.

    Attributes:
        dtype: Its element type.
        shape: Its shape.
        make: Returns it; asked whenever it is compared, so that no more than one is in memory.
    """

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def bits(self) -> NDArray[Any]:
        """Its bits as unsigned integers."""
        made = self.make().contiguous()
        return bits_of(made.view(_SIGNED[itemsize(self.dtype)][1]).numpy()).reshape(self.shape)

    def read(self, region: Region) -> NDArray[Any]:
        """Return the bits of a part, in the region's order."""
        return read_region(self.bits, region)


def outline(entry: Entry) -> torch.Tensor:
    """Return a tensor of a reference without its values."""
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")


def values_of(entry: Entry) -> torch.Tensor:
    """Return a tensor of a reference, in memory."""
    signed = np.array(entry.bits, order="C").view(_SIGNED[itemsize(entry.dtype)][0])
    return torch.from_numpy(signed.reshape(-1)).view(getattr(torch, entry.dtype)).reshape(entry.shape)
