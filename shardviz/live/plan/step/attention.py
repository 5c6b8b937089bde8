"""Which tensors are scores of attention: a CPU makes them if it has no fused kernel, and a GPU may have one."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardviz.live.compat import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

ATTENTION = functional.scaled_dot_product_attention

LEAST_DIMS = 2
"""Dims of a mask: scores have more, for heads or rows."""

ATEN = torch.ops.aten

PRODUCTS = {ATEN.bmm.default, ATEN.baddbmm.default}
"""What attention without a fused kernel is made of: the first product has scores, and the second none."""

MOVES = {
    *(ATEN.clone.default, ATEN.expand.default, ATEN.view.default, ATEN._unsafe_view.default, ATEN.unsqueeze.default),
    *(ATEN.transpose.int, ATEN.permute.default, ATEN.detach.default, ATEN.alias.default),
}
"""Operators between the two products that work nothing out: values go through them, too."""


class Attention(TorchFunctionMode):
    """Follows calls of `scaled_dot_product_attention`: by a mode, and if torch takes modes away, by its name.

    In a backward, where the forward of a checkpoint runs again, there are no modes; code that has the function under a
    name of its own is followed by the mode alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pairs: tuple[int, ...] = ()
        self._products = 0
        self._is_known_by_shape = False
        self._shapes: set[tuple[int, ...]] = set()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow calls until the context ends."""
        # `context_parallel` puts a function of its own where this one's name says that it is.
        followed = wraps(ATTENTION)(lambda *args, **kwargs: self._followed(*args, **kwargs))
        with replaced(functional, ATTENTION.__name__, followed), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; while it is attention, know how many queries and keys it has."""
        if func is ATTENTION:
            return self._followed(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _followed(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        sizes = [tuple(given[name].shape[-2:]) for name in ("query", "key", "value")]
        before = self._pairs, self._products, self._is_known_by_shape
        self._pairs, self._products = (sizes[0][0], sizes[1][0]), 0
        self._is_known_by_shape = self._pairs not in sizes
        try:
            return ATTENTION(*args, **kwargs)
        finally:
            self._pairs, self._products, self._is_known_by_shape = before

    def note(self, func: Any, value: Any, *, in_backward: bool) -> bool:
        """Note what an operator has returned, and whether that is a score for each pair of a query and a key.

        Gradients of scores are known by their shape, unless queries, keys or values have the same.
        """
        if not torch.is_tensor(value) or value.ndim <= LEAST_DIMS:
            return False
        shape = tuple(value.shape)
        if not self._pairs:
            return in_backward and shape in self._shapes
        self._products += func in PRODUCTS
        is_score = self._products == 1 and shape[-2:] == self._pairs and func not in MOVES
        if is_score and self._is_known_by_shape:
            self._shapes.add(shape)
        return is_score
