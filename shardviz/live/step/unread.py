"""Sums over ranks whose results nothing reads: in new tensors, or in copies that collectives wrote into."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardviz.live.lines.frames import user_line
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.dump.records.trace import FrameRecord

Sources = tuple[tuple[int, int], ...]
"""Tensors by where they begin in memory and their numbers of elements."""

COPIES = ("clone", "_to_copy", "cat", "stack", "div", "mul")
"""Operators whose results have the numbers of what they are given, perhaps scaled."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a collective.

    Attributes:
        op: The collective.
        ranks: The ranks of its group.
        line: The innermost line of the user's code.
        is_forward: Whether it ran in a forward pass.
        given: The memory and the number of elements of what it was given, or of what that is a copy of.
        kept: What it wrote its result into; None if it returned the result.
    """

    op: str
    ranks: tuple[int, ...]
    line: FrameRecord
    is_forward: bool
    given: Sources
    kept: StorageWeakRef | None = None


class Unread:
    """Follows the results of collectives until an operator reads them."""

    def __init__(self) -> None:
        self._dropped: list[Call] = []
        self._sources: dict[int, Sources] = {}
        self._pending: dict[int, Call] = {}
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def read(self, func: Any, args: Any) -> None:
        """Note what an operator reads; one that writes into its first argument does not read that."""
        if self._pending and not hands_on(func):
            is_written = _name(func).endswith("_") and not _name(func).startswith("_")
            for tensor in list(tensors_in(args))[is_written:]:
                if not self._is_gone(memory_of(tensor)):
                    self._pending.pop(memory_of(tensor), None)

    def made(self, func: Any, args: Any, result: Any) -> None:
        """Note of which tensors an operator made a copy."""
        made = result if isinstance(result, torch.Tensor) else None
        memory = memory_of(made) if made is not None else 0
        given = [(memory_of(tensor), tensor.numel()) for tensor in tensors_in(args)] if memory else []
        if made is None or not given or memory in (begin for begin, _ in given):
            return
        is_copy = _name(func) in COPIES and sum(size for _, size in given) == made.numel()
        sources = tuple(source for begin, size in given for source in self._sources.get(begin, ((begin, size),)))
        if is_copy:
            self._sources[memory] = sources
        else:
            self._sources.pop(memory, None)

    def handed_on(self, result: Any) -> None:
        """Note that a result lives on in another tensor: the start of a wait, or its end."""
        call = self._pending.get(memory_of(result)) if isinstance(result, torch.Tensor) else None
        if call is not None:
            self._watch(result, replace(call))

    def called(self, op: str, ranks: tuple[int, ...], given: Sequence[Any], result: Any, *, is_forward: bool) -> None:
        """Note a functional collective that has returned its result."""
        tensor = next(iter(tensors_in(given)), None)
        line = user_line() if tensor is not None and isinstance(result, torch.Tensor) else None
        if tensor is not None and line is not None:
            self._watch(result, Call(op, ranks, line, is_forward, self._sources_of(tensor)))

    def written(self, op: str, ranks: tuple[int, ...], tensors: Sequence[torch.Tensor], *, is_forward: bool) -> None:
        """Note a collective that has written its result into a tensor."""
        line = user_line() if tensors else None
        for tensor in tensors if line is not None else ():
            memory = memory_of(tensor)
            self._is_gone(memory)
            if memory and line is not None:
                kept = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._pending[memory] = Call(op, ranks, line, is_forward, self._sources_of(tensor), kept)

    def dropped(self) -> list[Call]:
        """Return the calls whose results are gone, and nothing read them."""
        for memory in list(self._pending):
            self._is_gone(memory)
        return self._dropped

    def _is_gone(self, memory: int) -> bool:
        """Whether what a collective wrote into is gone, and what stands there now is something else."""
        call = self._pending.get(memory)
        if call is None or call.kept is None or not call.kept.expired():  # type: ignore[no-untyped-call]
            return False
        self._dropped.append(self._pending.pop(memory))
        return True

    def _sources_of(self, tensor: torch.Tensor) -> Sources:
        return self._sources.get(memory_of(tensor), ((memory_of(tensor), tensor.numel()),))

    def _watch(self, result: torch.Tensor, call: Call) -> None:
        memory = memory_of(result)

        def gone(_: object) -> None:
            if self._pending.get(memory) is call:
                self._dropped.append(self._pending.pop(memory))

        if memory:
            self._pending[memory] = call
            self._alive.append(weakref.ref(result, gone))


def hands_on(func: Any) -> bool:
    """Whether an operator waits for the result of a collective or wraps it, and reads none of its numbers."""
    return any(name in str(func) for name in ("wait_tensor", "_wrap_tensor_autograd"))


def _name(func: Any) -> str:
    """Return the name of an operator without its library and its overload: `clone` for `aten.clone.default`."""
    return str(func).partition(".")[2].partition(".")[0]


def memory_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's numbers begin in memory, or those of the tensor that it wraps; 0 if it has none."""
    inner = getattr(tensor, "elem", tensor)
    inner = getattr(inner, "_local_tensor", inner)
    try:
        return int(inner.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a fake tensor
        return 0
