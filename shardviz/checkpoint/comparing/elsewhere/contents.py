"""Tensors found by what is in them: by a few of their values, and then by all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.agreement import can_cast, is_same, narrower
from shardviz.errors import DumpError
from shardviz.relate.casts import cast
from shardviz.relate.values import is_alike

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.tensor import Tensor

SAMPLES = 64
"""Values of a tensor that are looked up."""


@dataclass
class Contents:
    """Tensors by what is in them.

    Attributes:
        by_shape: The tensors of each shape.
    """

    by_shape: dict[tuple[int, ...], list[Tensor]]
    _samples: dict[int, NDArray[Any] | None] = field(default_factory=dict)
    _tables: dict[tuple[tuple[int, ...], str, str], dict[bytes, list[Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Contents:
        """Return tensors; their values are read only when one is looked for."""
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for tensor in tensors:
            by_shape.setdefault(tensor.shape, []).append(tensor)
        return cls(by_shape)

    def equal_to(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensors with the values of a given one, after a cast; none if all its values are alike."""
        sample = sample_of(tensor)
        if sample is None:
            return
        for dtype in dict.fromkeys(dtype_of(candidate) for candidate in self.by_shape.get(tensor.shape, ())):
            if not dtype or not can_cast(dtype, tensor.dtype):
                continue
            narrow = narrower(dtype, tensor.dtype)
            key = cast(sample, tensor.dtype, narrow)
            for candidate in self._table(tensor.shape, dtype, narrow).get(b"" if key is None else key.tobytes(), ()):
                if (
                    candidate is not tensor
                    and is_same(candidate, tensor)
                    and not (is_alike(tensor.bits) or is_alike(candidate.bits))
                ):
                    yield candidate

    def _table(self, shape: tuple[int, ...], dtype: str, narrow: str) -> dict[bytes, list[Tensor]]:
        key = shape, dtype, narrow
        if key not in self._tables:
            table: dict[bytes, list[Tensor]] = {}
            for tensor in self.by_shape[shape]:
                sample = self._sample(tensor) if dtype_of(tensor) == dtype else None
                turned = None if sample is None else cast(sample, dtype, narrow)
                if turned is not None:
                    table.setdefault(turned.tobytes(), []).append(tensor)
            self._tables[key] = table
        return self._tables[key]

    def _sample(self, tensor: Tensor) -> NDArray[Any] | None:
        """Return some of a tensor's values; None if it cannot be read, or has none."""
        if id(tensor) not in self._samples:
            self._samples[id(tensor)] = sample_of(tensor)
        return self._samples[id(tensor)]


def sample_of(tensor: Tensor) -> NDArray[Any] | None:
    """Return some of a tensor's values; None if it cannot be read, or has none."""
    try:
        bits = tensor.bits
    except (DumpError, OSError):
        return None
    if not bits.size or not bits.ndim:
        return np.array(bits).reshape(-1) if bits.size else None
    places = np.linspace(0, bits.size - 1, SAMPLES).astype(np.int64)
    found: NDArray[Any] = bits[np.unravel_index(places, bits.shape)]
    return found


def dtype_of(tensor: Tensor) -> str:
    """Return a tensor's element type; empty if it is made of several."""
    try:
        return tensor.dtype
    except DumpError:
        return ""
