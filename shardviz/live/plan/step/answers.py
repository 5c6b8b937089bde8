"""What code gets that reads values, which a plan does not have: an answer to go on with, or a refusal."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.errors import ShardvizError
from shardviz.live.plan.forks import own_line
from shardviz.text import counted

READS = torch.ops.aten._local_scalar_dense.default
"""What `item()`, `tolist()`, `float()` and `if tensor:` come down to."""

TRIED = (0.0, math.inf)
"""What a number that a step reads is taken as, one after the other: where the step is the same, it does not matter."""

NOT_TRUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Operators whose results are not the real ones where a value is not."""

MOST = 1 << 16
"""Numbers that are answered at most: code that waits for another one would wait for ever."""


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers every question for a number with the same one.

    Args:
        number: The number; where a tensor has integers and this is not one, it is 1.

    Attributes:
        asked: The lines of code that have asked; an empty one for code of a library.
    """

    def __init__(self, number: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number = number
        self._left = MOST
        self.asked: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, unless it reads a number."""
        if func is not READS or not self._left:
            return func(*args, **(kwargs or {}))
        self._left -= 1
        self.asked[own_line().strip()] = None
        return self._as(args[0].dtype)

    @property
    def said(self) -> str:
        """What was asked for, in words."""
        first, *others = self.asked
        more = f" and on {counted(len(others), 'more line')}" if others else ""
        return f"{'values' if others else 'a value'}{first and f' {first}'}{more}"

    def _as(self, dtype: torch.dtype) -> bool | int | float | complex:
        if dtype == torch.bool:
            return bool(self._number)
        if dtype.is_floating_point or dtype.is_complex:
            return complex(self._number) if dtype.is_complex else float(self._number)
        return int(self._number) if math.isfinite(self._number) else 1


class Refusal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to read values in a step that has some: a plan sends nothing, so they are not those of a real step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, unless what it returns depends on values in more than values.

        Raises:
            ShardvizError: It does.
        """
        if NOT_TRUE & set(func.tags):
            raise ShardvizError(f"the step reads a value, and a plan has no true one{own_line()}")
        return func(*args, **(kwargs or {}))


class NumpyRefusal(TorchFunctionMode):
    """Refuses to hand a tensor to numpy, which no operator shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, unless it is `numpy()`.

        Raises:
            ShardvizError: It is.
        """
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise ShardvizError(f"the step reads values by numpy(), and a plan has none{own_line()}")
        return func(*args, **(kwargs or {}))
