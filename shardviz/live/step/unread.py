"""Sums over ranks whose results nothing reads: functional collectives return them in new tensors."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.live.lines.frames import user_line
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.dump.records.lines import FrameRecord


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a functional collective.

    Attributes:
        op: The collective.
        ranks: The ranks of its group.
        line: The innermost line of the user's code.
        is_forward: Whether it ran in a forward pass.
        given: The memory and the number of elements of what it was given.
    """

    op: str
    ranks: tuple[int, ...]
    line: FrameRecord
    is_forward: bool
    given: tuple[int, int]


class Unread:
    """Follows the results of functional collectives until an operator reads them.

    Attributes:
        dropped: The calls whose results are gone, and nothing read them.
    """

    def __init__(self) -> None:
        self.dropped: list[Call] = []
        self._pending: dict[int, Call] = {}
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def read(self, func: Any, args: Any) -> None:
        """Note what an operator reads."""
        if self._pending and not hands_on(func):
            for tensor in tensors_in(args):
                self._pending.pop(memory_of(tensor), None)

    def handed_on(self, result: Any) -> None:
        """Note that a result lives on in another tensor: the begin of a wait, or the end of it."""
        call = self._pending.get(memory_of(result)) if isinstance(result, torch.Tensor) else None
        if call is not None:
            self._watch(result, replace(call))

    def called(self, op: str, ranks: tuple[int, ...], given: Sequence[Any], result: Any, *, is_forward: bool) -> None:
        """Note a functional collective that has returned its result."""
        tensor = next(iter(tensors_in(given)), None)
        line = user_line() if tensor is not None and isinstance(result, torch.Tensor) else None
        if tensor is not None and line is not None:
            self._watch(result, Call(op, ranks, line, is_forward, (memory_of(tensor), tensor.numel())))

    def _watch(self, result: torch.Tensor, call: Call) -> None:
        memory = memory_of(result)

        def gone(_: object) -> None:
            if self._pending.get(memory) is call:
                self.dropped.append(self._pending.pop(memory))

        if memory:
            self._pending[memory] = call
            self._alive.append(weakref.ref(result, gone))


def hands_on(func: Any) -> bool:
    """Whether an operator waits for the result of a collective or wraps it, and reads none of its numbers."""
    return any(name in str(func) for name in ("wait_tensor", "_wrap_tensor_autograd"))


def memory_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's numbers begin in memory, or those of the tensor that it wraps; 0 if it has none."""
    inner = getattr(tensor, "elem", tensor)
    inner = getattr(inner, "_local_tensor", inner)
    try:
        return int(inner.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a fake tensor
        return 0
