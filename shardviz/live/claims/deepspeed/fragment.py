"""A rank's fragment of a parameter's master copy and moments in an optimizer's buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

MASTER = "fp32"
"""What a master copy is called behind its parameter's name: as DeepSpeed's universal checkpoints call it."""


@dataclass(frozen=True)
class Fragment:
    """The elements of one parameter that this rank's optimizer steps.

    Attributes:
        name: The parameter's name in the unwrapped model.
        shape: Its shape.
        ranks: The ranks that its elements are divided among, in the group's order.
        start: The first element of the flattened parameter that this rank says it has.
        values: The master copy of these elements, one-dimensional; empty if the rank has none.
        weight: What they are copies of, one-dimensional: the whole flattened parameter, or the same elements of it.
        is_whole: Whether `weight` is the whole parameter.
        offset: The parameter's first element in the flat buffers of all ranks laid end to end; None if unknown.
        part: The elements of one rank's flat buffer; 0 if unknown.
        states: The optimizer's states of these elements by kind, such as `exp_avg`.
        group: Their process group.
        buffer: The number of the flat buffer among the optimizer's; -1 if the rank has no fragment.
        buffers: The states of the whole flat buffer by kind.
    """

    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    start: int
    values: torch.Tensor
    weight: torch.Tensor
    is_whole: bool
    offset: int | None = None
    part: int = 0
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    group: Any = None
    buffer: int = -1
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of elements that this rank has."""
        return self.values.numel()

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)
