"""Which tensors are scores of attention: a CPU makes them where it has no fused kernel, and a GPU may have one."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Attention(TorchFunctionMode):
    """Follows calls of `scaled_dot_product_attention`, but for those in a backward, where torch takes modes away."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs: tuple[int, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; while it is attention, know how many queries and keys it has."""
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key"), args, strict=False)) | (kwargs or {})
        before, self._pairs = self._pairs, (given["query"].shape[-2], given["key"].shape[-2])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._pairs = before

    def has_made(self, value: Any) -> bool:
        """Whether an operator has just returned a score for each pair of a query and a key, of every head."""
        is_tensor = torch.is_tensor(value) and value.ndim > 2
        return bool(self._pairs) and is_tensor and tuple(value.shape[-2:]) == self._pairs
