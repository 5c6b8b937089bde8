"""The collectives of a training step by module, axis and bytes, recorded by torch's own `CommDebugMode`.

`CommDebugMode` counts collectives by module; this subclass also records the ranks and the size of each. It sees every
collective that goes through torch's dispatcher: DTensor's, FSDP's, DistributedDataParallel's and those called by hand.
`Unread` finds sums whose results nothing reads: in new tensors, or in copies that collectives wrote into.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef

from shardviz.dump.records.step import (
    FROM_ONE_RANK,
    CastRecord,
    CollectiveRecord,
    MoveRecord,
    ReductionRecord,
    UnreadRecord,
)
from shardviz.live.capture.stamp import dtype_name
from shardviz.live.compat.fsdp import unit_calling
from shardviz.live.compat.modules import clean_name, follow_modules_by
from shardviz.live.compat.worlds import ranks_of_operator
from shardviz.live.lines.frames import user_line
from shardviz.live.step.running import Running, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from shardviz.dump.records.trace import FrameRecord
    from shardviz.layout.mesh import Mesh


_LIBRARIES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_SPELLINGS = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all", "recv_any_source": "recv"}
_SUMS = ("all_reduce", "reduce_scatter", "reduce")
_MOVES = ("all_gather", "all_to_all", "gather")
_MAX_CASTS = 1024
_NO_COLLECTIVES = ("wait_tensor", "monitored_barrier", "_wrap_tensor_autograd")

Key = tuple[str, tuple[int, ...], str, bool, bool]
"""Operation, ranks, module, whether in backward, whether outside of all modules."""


class Comms(CommDebugMode):  # type: ignore[no-untyped-call]
    """A `CommDebugMode` that also records ranks and bytes, and dtypes in which values lost precision.

    Args:
        model: The model whose modules are named; without it, collectives have no module.

    Attributes:
        narrowed_to: Dtypes to which values of a wider dtype were rounded.
        moves: Collectives without a backward that moved floats before the first backward, outside of modules, and what
            one rank sent to others before it, anywhere.
        casts: The first casts to float8.
        summed_in: Dtypes in which numbers were summed over ranks in backward, or after it.
        exchanged: The groups over which modules gather, exchange or sum numbers in forward, but for FSDP2's weights.
        unread: The results of collectives that nothing reads.
        on_write: Is given the tensors of collectives that may write into them, which leaves their versions as they are.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = Running(model)
        follow_modules_by(self, self._running)
        self._counts: dict[Key, tuple[int, int]] = {}
        self._reduced: Counter[tuple[tuple[int, ...], torch.dtype, int]] = Counter()
        self._is_before_backward = True
        self.narrowed_to: set[torch.dtype] = set()
        self.casts: list[CastRecord] = []
        self.moves: list[MoveRecord] = []
        self.summed_in: set[torch.dtype] = set()
        self.exchanged: set[tuple[int, ...]] = set()
        self.unread = Unread()
        self.on_write: Callable[[Iterable[torch.Tensor]], None] | None = None

    @property
    def module(self) -> str:
        """The module that is running; empty for the model itself, or if none is."""
        return self._running.name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a collective, then let torch count and run it."""
        self._is_before_backward = self._is_before_backward and not self._running.is_bw
        self.note(func, args, kwargs)
        self.unread.read(func, (args, kwargs or {}))
        returned: Any = NotImplemented  # for DTensor to take it apart, of which torch 2.6 would write down the mesh
        if DTensor not in types:
            returned = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self.on_write is not None and str(func).startswith("c10d"):
            self.on_write(tensors_in((*args, *(kwargs or {}).values())))
        self._note_narrowing(func, args, returned)
        self._note_result(func, args, returned)
        return returned

    @contextmanager
    def only_modules(self) -> Iterator[None]:
        """Follow which module is running, and see no operators: `note` is called with the collectives among them."""
        self._running.__enter__()
        try:
            yield
        finally:
            self._running.__exit__()

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Record an operator, if it is a collective."""
        if op := collective_name(func):
            self._note(op, func, (*args, *(kwargs or {}).values()))

    def _note_result(self, func: Any, args: tuple[Any, ...], returned: Any) -> None:
        """Follow what a collective returned or wrote until something reads it."""
        op = collective_name(func)
        is_forward = not (self._running.is_bw or self._running.is_outside)
        if not op and not is_forward:
            self.unread.made(func, args, returned)
        if op == "all_reduce" and "functional" not in str(func):
            self.unread.written(op, ranks_of_operator(func, args), list(tensors_in(args[:1])), is_forward=is_forward)
        elif op in _SUMS and "functional" in str(func):
            self.unread.called(op, ranks_of_operator(func, args), args, returned, is_forward=is_forward)
        elif hands_on(func):
            self.unread.handed_on(returned)

    def unread_records(self, mesh: Mesh, rank: int, model: nn.Module) -> tuple[UnreadRecord, ...]:
        """Return the sums whose results nothing read, each with the parameter whose gradient it was given."""
        gradients = {
            (memory_of(param.grad), param.grad.numel()): clean_name(name)
            for name, param in model.named_parameters()
            if param.grad is not None
        }
        return tuple(
            UnreadRecord(
                call.op, _axes(mesh, rank, call.ranks), call.line, name, call.is_forward, call.kept is not None
            )
            for call in self.unread.dropped()
            for name in [gradients[source] for source in call.given if source in gradients] or [""]
        )

    def _note_narrowing(self, func: Any, args: tuple[Any, ...], returned: Any) -> None:
        """Record the dtype of rounded results, and of narrower inputs beside wider ones."""
        taken = [tensor for tensor in tensors_in(args) if tensor.is_floating_point()]
        widest = max((tensor.dtype.itemsize for tensor in taken), default=0)
        in_place = args[:1] if "copy_" in str(func) else ()
        operands = [tensor for tensor in tensors_in((*in_place, returned)) if tensor.is_floating_point()]
        inputs = [tensor for tensor in taken if tensor.ndim]
        self._note_casts(taken, operands)
        self.narrowed_to |= {tensor.dtype for tensor in (*operands, *inputs) if tensor.dtype.itemsize < widest}

    def _note_outside(self, op: str, ranks: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> None:
        """Record what makes the loss: a reduction, or what is moved and gets no gradient back."""
        if op in _SUMS:
            self._reduced.update((ranks, tensor.dtype, tensor.numel()) for tensor in tensors[:1])
        elif (
            op in _MOVES
            and torch.is_grad_enabled()
            and any(tensor.is_floating_point() and tensor.numel() > 1 for tensor in tensors)
        ):
            self._note_move(op)

    def _note_move(self, op: str) -> None:
        line = user_line()
        self.moves.append(MoveRecord(op, "" if line is None else f"{line.file}:{line.line}"))

    def _note_casts(self, taken: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """Record a cast to float8, with the largest number that it was given."""
        for tensor in given if len(self.casts) < _MAX_CASTS else ():
            is_cast = tensor.dtype.itemsize == 1 and bool(taken) and taken[-1].dtype.itemsize > 1
            if is_cast and taken[-1].shape == tensor.shape and tensor.numel():
                largest = float(taken[-1].detach().abs().amax())
                dtype = dtype_name(tensor.dtype)
                self.casts.append(CastRecord(self._running.name, dtype, tensor.numel(), largest))

    def _note(self, op: str, func: Any, args: tuple[Any, ...]) -> None:
        ranks = ranks_of_operator(func, args)
        if op in _SUMS and (self._running.is_bw or self._running.is_outside):
            self.summed_in |= {tensor.dtype for tensor in tensors_in(args) if tensor.is_floating_point()}
        if self._running.is_outside and self._is_before_backward:
            self._note_outside(op, ranks, list(tensors_in(args)))
        if op in FROM_ONE_RANK and self._is_before_backward and any(tensor.numel() > 1 for tensor in tensors_in(args)):
            self._note_move(op)
        unit = unit_calling()
        if op in (*_MOVES, *_SUMS) and unit is None and not (self._running.is_bw or self._running.is_outside):
            self.exchanged.add(ranks)
        module = self._running.name_of(unit)
        key = (op, ranks, module, self._running.is_bw, self._running.is_outside)
        count, size = self._counts.get(key, (0, 0))
        self._counts[key] = count + 1, size + _payload(func, args, len(ranks))

    def records(self, mesh: Mesh, rank: int, *, with_ranks: bool = False) -> tuple[CollectiveRecord, ...]:
        """Return the collectives, with the axes of the run's mesh that each group runs along.

        Args:
            with_ranks: Whether to name the ranks of a group that runs along no axis.
        """
        collectives = []
        for (op, ranks, module, backward, outside), (count, size) in self._counts.items():
            axes = _axes(mesh, rank, ranks)
            named = () if axes or not with_ranks else ranks
            collectives.append(CollectiveRecord(op, axes, len(ranks), module, backward, count, size, outside, named))
        return tuple(collectives)

    def reductions(self, mesh: Mesh, rank: int) -> tuple[ReductionRecord, ...]:
        """Return what was reduced outside of all modules before the first backward."""
        return tuple(
            ReductionRecord(_axes(mesh, rank, ranks), dtype_name(dtype), size, count)
            for (ranks, dtype, size), count in self._reduced.items()
        )


@lru_cache(maxsize=4096)
def collective_name(func: Any) -> str:
    """Return what a collective is called; empty for another operator."""
    library, _, name = str(func).partition("::" if "::" in str(func) else ".")
    return _plain(name) if library in _LIBRARIES and not name.startswith(_NO_COLLECTIVES) else ""


@lru_cache(maxsize=4096)
def is_communication(func: Any) -> bool:
    """Whether an operator is one of the libraries that communicate: a collective, a send, a barrier."""
    return str(func).partition("::" if "::" in str(func) else ".")[0] in _LIBRARIES


def _plain(name: str) -> str:
    """Return `all_gather` for `_allgather_base_.default`, `all_gather_into_tensor.default` and the like."""
    name = name.partition(".")[0].strip("_")
    name = re.sub("(_base|_into_tensor|_tensor|_coalesced|_single|_out)+$", "", name)
    return _SPELLINGS.get(name, name)


def _payload(func: Any, args: tuple[Any, ...], num_ranks: int) -> int:
    """Return the bytes of the whole tensor in a collective, from the larger of its input and output."""
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(arg)) for arg in args]
    largest = max(sizes, default=0)
    gathers_to_result = "functional" in str(func) and "all_gather" in str(func)
    return largest * num_ranks if gathers_to_result else largest


@lru_cache(maxsize=256)
def _axes(mesh: Mesh, rank: int, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the fewest axes along which a group of this rank runs."""
    group = sorted(ranks)
    for count in range(1, mesh.ndim + 1) if rank in mesh else ():
        for axes in combinations(mesh.axes, count):
            if sorted(mesh.group_of(rank, *axes)) == group:
                return axes
    return ()


Sources = tuple[tuple[int, int], ...]
"""Tensors by where they begin in memory and their numbers of elements."""

COPIES = ("clone", "_to_copy", "cat", "stack", "div", "mul")
"""Operators whose results have the numbers of what they are given, perhaps scaled."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a collective.

    Attributes:
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
