"""What a recorder of lines keeps: tensors, calls, and what is there before a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.dump.records.trace import FrameRecord, LineRecord, ValueRecord

if TYPE_CHECKING:
    import torch

    from shardviz.live.lines.ways import Edge

SENT_BACK = "sent back"
"""The origin of what one of a tensor's readers sends back to it."""

Frames = tuple[tuple[FrameRecord, ...], int, FrameRecord | None]


@dataclass
class Value:
    """A tensor, with a copy of this rank's part and of its gradient."""

    number: int
    tensor: torch.Tensor
    version: tuple[int, int]
    epoch: int
    origin: str = ""
    values: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    shape: tuple[int, ...] = ()
    placements: str = ""
    axes: tuple[str, ...] = ()
    needs_grad: bool = False
    again: Value | None = None
    memory: int = 0

    def record(self) -> ValueRecord:
        """Return it without its numbers."""
        gradient = self.back is not None
        needs_grad = any(value.needs_grad and value.values is not None for value in (self, self.again) if value)
        left_out = self.values is None
        sides = needs_grad, self.placements, left_out, gradient, self.memory, self.axes, self.again is not None
        return ValueRecord(self.number, self.shape, self.origin, *sides)

    @property
    def back(self) -> torch.Tensor | None:
        """The gradient that came back, to the call or to its recomputation."""
        return self.gradient if self.gradient is not None or self.again is None else self.again.gradient


@dataclass
class Event:
    """One call."""

    call: int
    function: str
    frames: Frames
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    is_collective: bool = False
    numbers: str = ""
    sent: tuple[tuple[int, int], ...] = ()

    def record(self) -> LineRecord:
        """Return it as it stands in a dump."""
        frames, own, since = self.frames
        tensors = self.inputs, self.outputs, self.ranks
        collective, numbers = self.is_collective, self.numbers
        return LineRecord(self.call, self.function, frames, own, *tensors, collective, numbers, since, self.sent)


@dataclass(frozen=True)
class Before:
    """What is there before a call.

    Attributes:
        inputs: The numbers of the tensors in its arguments.
        versions: Their versions.
        edges: Where their gradients go.
        num_events: How many calls were recorded.
    """

    inputs: tuple[int, ...]
    versions: list[tuple[int, int]]
    edges: list[Edge | None]
    num_events: int
