"""Tensors of a reference that a loader makes of one or more of its own, read when they are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardviz.reference.files import Entry
from shardviz.reference.lookup import bits_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_SIGNED = {1: (np.int8, torch.int8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}


@dataclass(frozen=True, slots=True)
class Merged(Entry):
    """A tensor of the model that a loader makes of one or more tensors of a file.

    Attributes:
        make: Returns it; asked whenever it is compared, so that no more than one is in memory.
    """

    make: Callable[[], torch.Tensor] = torch.Tensor

    @property
    def bits(self) -> NDArray[Any]:
        """Its bits as unsigned integers."""
        made = self.make().contiguous()
        return bits_of(made.view(_SIGNED[self.width][1]).numpy()).reshape(self.shape)


def outline(entry: Entry) -> torch.Tensor:
    """Return a tensor of a reference without its values."""
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")


def values_of(entry: Entry) -> torch.Tensor:
    """Return a tensor of a reference, in memory."""
    signed = np.array(entry.bits, order="C").view(_SIGNED[entry.width][0])
    return torch.from_numpy(signed.reshape(-1)).view(getattr(torch, entry.dtype)).reshape(entry.shape)
