"""What a recorder of lines keeps: tensors, their numbers and memory, calls, and what is there before a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records.trace import FrameRecord, LineRecord, ValueRecord
from shardviz.live.capture.locals import of_tensor
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
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


def tensors_kept(tensors: Any, *, wait: bool = True) -> list[torch.Tensor]:
    """Return the tensors in some arguments that can be kept; functional collectives among them are waited for."""
    tensors_kept = []
    for tensor in tensors_in(tensors):
        if hasattr(tensor, "trigger_wait"):
            if wait:
                tensor.trigger_wait()
            tensor = tensor.elem  # type: ignore[attr-defined]
        if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta):
            tensors_kept.append(tensor)
    return tensors_kept


def has_memory(local: torch.Tensor) -> bool:
    """Whether a tensor can be read; FSDP2 frees the storage of whole weights that it has split again."""
    return hasattr(local, "trigger_wait") or not local.numel() or local.untyped_storage().nbytes() > 0


def real_of(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor, of complex numbers as pairs: what relates real numbers relates those too."""
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local


def storage_of(tensor: torch.Tensor) -> int:
    """Return where the storage of this rank's part of a tensor begins; the tensor's identity if it has no memory."""
    local = of_tensor("", "activation", tensor).values
    if hasattr(local, "trigger_wait"):  # a DTensor's own part may be waited for, too
        local = local.elem  # type: ignore[attr-defined]
    return local.untyped_storage().data_ptr() or id(tensor)
