"""Which tensors are scores of attention: a CPU makes them where it has no fused kernel, and a GPU may have one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardviz.live.compat import replaced

ATTENTION = functional.scaled_dot_product_attention

LEAST_DIMS = 2
"""Dims of a mask: scores have more, for heads or rows."""


class Attention(TorchFunctionMode):
    """Follows calls of `scaled_dot_product_attention`: by a mode, and where torch takes modes away, by its name.

    In a backward, where the forward of a checkpoint runs again, there are no modes; code that has the function under a
    name of its own is followed by the mode alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pairs: tuple[int, ...] = ()
        self._shapes: set[tuple[int, ...]] = set()
        self._named = ExitStack()

    def __enter__(self) -> Attention:
        self._named.enter_context(replaced(functional, ATTENTION.__name__, self._followed))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._named.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; while it is attention, know how many queries and keys it has."""
        if func is ATTENTION:
            return self._followed(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _followed(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("query", "key"), args, strict=False)) | kwargs
        before, self._pairs = self._pairs, (given["query"].shape[-2], given["key"].shape[-2])
        try:
            return ATTENTION(*args, **kwargs)
        finally:
            self._pairs = before

    def has_made(self, value: Any, *, in_backward: bool) -> bool:
        """Whether an operator has just returned a score for each pair of a query and a key, of every head.

        Their gradients have their shape.
        """
        if not torch.is_tensor(value) or value.ndim <= LEAST_DIMS:
            return False
        shape = tuple(value.shape)
        if self._pairs and shape[-2:] == self._pairs:
            self._shapes.add(shape)
            return True
        return in_backward and shape in self._shapes
