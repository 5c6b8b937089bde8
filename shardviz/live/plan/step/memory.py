"""What a step holds beside its weights: every storage is followed from when it is made to when it is freed.

The storages that an operator returns are followed by weak references, so that whatever keeps one counts: autograd, the
inputs of a checkpoint, a list of the model's own. What they are is only known when the step has ended, so the step
writes a log, and `Log.peak` and `Log.kept` add it up afterwards.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardviz.dump.records.plan import PeakRecord
from shardviz.errors import ProbeError
from shardviz.live.compat import (
    UnwrappedMode,
    flat_gradients_reduced,
    id_without_memory,
    in_backward,
    plain_tensors,
    storages_resized,
    working_out_shapes,
)
from shardviz.live.plan.step.attention import Attention
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from shardviz.live.step.comms import Comms

FORWARD_ENDS = -1
"""In a log, instead of the number of a storage: a forward that was waited for has ended."""

ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)
"""Operators that make another tensor of the same memory, which torch allows of memory that is freed."""

ATEN = torch.ops.aten

OF_ONE_DTYPE = {
    ATEN.mm.default: (0, 1),
    ATEN.mv.default: (0, 1),
    ATEN.addmm.default: (0, 1, 2),
    ATEN.convolution.default: (0, 1, 2),
    ATEN.index_put.default: (0, 2),
    ATEN.index_put_.default: (0, 2),
    ATEN.index_add.default: (0, 3),
}
"""Operators that refuse operands of two element types where they have values, and not where they have none: which.

Found by trying operators in both ways, on torch 2.13.0.
"""

FREED = (
    "in backward the step reads weights that FSDP has freed, where a real one raises: FSDP gathers them for one "
    "backward of a forward, not for a second, as after autograd.grad(create_graph=True)"
)


@dataclass(slots=True)
class Made:
    """One storage.

    Attributes:
        module: The module that was running when it was made.
        in_backward: Whether that was in backward.
        of_fsdp: Whether it has weights that FSDP gathered, gradients that it has not reduced, or is sent by it.
        is_score: Whether it is of attention, a number for each pair of a query and a key.
        is_state: Whether it is a weight, the gradient of one or a bucket of them, which are counted apart.
        parts: In backward, what it was put together from: FSDP1's flat gradient from those of weights.
    """

    module: str
    in_backward: bool
    of_fsdp: bool = False
    is_score: bool = False
    is_state: bool = False
    parts: Sequence[Made] = ()


@dataclass
class Log:
    """What was made and freed, in order.

    Attributes:
        made: The storages.
        events: For each change the number of the storage, and by how many bytes it grew or shrank.
    """

    made: list[Made] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)

    def peak(self) -> PeakRecord:
        """Return the moment at which most was held."""
        activations = gathered = scores = fused = 0
        most = PeakRecord()
        for number, size in self.events:
            one = self.made[number]
            if number == FORWARD_ENDS or one.is_state:
                continue
            gathered += size if one.of_fsdp else 0
            activations += 0 if one.of_fsdp else size
            scores += size if one.is_score else 0
            fused = max(fused, activations + gathered - scores)
            if activations + gathered > most.activations + most.gathered:
                most = PeakRecord(activations, gathered, one.module, one.in_backward, scores)
        return replace(most, fused=fused) if most.scores else most

    def kept(self) -> Counter[str]:
        """Return the bytes that wait for backward by module, at the end of the forward after which there were most."""
        now: Counter[str] = Counter()
        most: Counter[str] = Counter()
        for number, size in self.events:
            if number == FORWARD_ENDS:
                most = Counter(now) if now.total() > most.total() else most
            elif not (self.made[number].is_state or self.made[number].of_fsdp):
                now[self.made[number].module] += size
        return most


@lru_cache(maxsize=4096)
def waits(func: Any) -> bool:
    """Whether an operator waits for a collective."""
    return "wait_tensor" in str(func)


class Memory(UnwrappedMode):
    """Follows storages while a model runs; `Watched` shows it the operators.

    Args:
        model: The model.
        passes: The modules whose forwards are what is waited for: the stages of a pipeline, or the model itself.
        comms: Knows which module is running.
        buckets: Those of DistributedDataParallel, which are there when the step has ended.

    Attributes:
        log: What was made and freed.
    """

    def __init__(
        self, model: nn.Module, passes: Iterable[nn.Module], comms: Comms, buckets: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._passes = tuple(passes)
        self._comms = comms
        self._buckets = buckets
        self._followed: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        self._emptied: set[int] = set()
        self._stack = ExitStack()
        self._only_shapes: Callable[[], bool] = bool
        self._reduces_flat: Callable[[], bool] = bool
        self._attention = Attention()
        self.log = Log()

    def __enter__(self) -> Memory:
        self._mark_state()
        for one in self._passes:
            ended = one.register_forward_hook(lambda *_: self.log.events.append((FORWARD_ENDS, 0)))
            self._stack.callback(ended.remove)
        self._stack.enter_context(storages_resized(self._resized))
        self._stack.callback(register_optimizer_step_pre_hook(lambda *_: self._mark_state()).remove)
        self._stack.callback(
            register_optimizer_step_post_hook(lambda of, *_: self._mark(list(of.state.values()))).remove
        )
        self._stack.enter_context(self._attention)
        self._only_shapes = self._stack.enter_context(working_out_shapes())
        self._reduces_flat = self._stack.enter_context(flat_gradients_reduced(self._mark_flat))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()
        self._mark_state()
        self._followed.clear()  # what is freed from now on is not of the step

    def _followed_up(self, func: Any, args: Any, kwargs: Any, returned: Any) -> Any:
        """Follow the storages that an operator made, and return what it returns with values."""
        if waits(func):
            return args[0]  # without values a new tensor is returned, with values the same one
        takes_all = getattr(func, "namespace", "") == "fsdp"
        is_of_fsdp = takes_all or self._reduces_flat()
        for made in self._made_in([returned, args, kwargs] if takes_all else returned):
            made.of_fsdp = made.of_fsdp or is_of_fsdp
            made.is_score = made.is_score or self._attention.note(func, returned, in_backward=made.in_backward)
            if func is torch.ops.aten.cat.default and made.in_backward:
                made.parts = self._made_in(args)
        return returned

    def _refuse_freed(self, func: Any, args: Any) -> None:
        """Refuse an operator in backward that reads what FSDP has freed: only with values does torch notice.

        Raises:
            ProbeError: It does.
        """
        if not self._emptied or func in ALIASES or not in_backward():
            return
        for one in args:
            if isinstance(one, torch.Tensor) and one.layout == torch.strided and one.numel():
                storage = one.untyped_storage()
                if id_without_memory(storage) in self._emptied and not storage.nbytes():
                    raise ProbeError(FREED)

    def _refuse_dtypes(self, func: Any, args: Any) -> None:
        """Refuse operands of different element types where only an operator with values does.

        Raises:
            RuntimeError: They are, as torch raises it.
        """
        if func in OF_ONE_DTYPE:
            operands = [args[at] for at in OF_ONE_DTYPE[func]]
            dtypes = dict.fromkeys(str(one.dtype) for one in operands if one is not None)
            if len(dtypes) > 1:
                raise RuntimeError(f"{func.__name__.partition('.')[0]}() of {' and '.join(dtypes)}")

    def _mark_flat(self, gradient: torch.Tensor | None) -> None:
        """Mark a gradient that FSDP1 is about to reduce, and those of the weights that it is made of."""
        for made in self._made_in(gradient):
            made.of_fsdp = True
            for part in made.parts:
                part.of_fsdp = True

    def _mark_state(self) -> None:
        """Mark weights and their gradients: those from before a step, and those that have replaced them."""
        weights = (*self._model.parameters(), *self._model.buffers())
        self._mark([*weights, *(one.grad for one in weights), *self._buckets])

    def _mark(self, state: Any) -> None:
        for made in self._made_in(state):
            made.is_state = True

    def _made_in(self, value: Any) -> list[Made]:
        """Return the storages of all tensors in a value, which are followed from now on."""
        plain = [part for tensor in tensors_in(value) for part in plain_tensors(tensor)]
        return [self._made(one.untyped_storage()) for one in plain if one.layout == torch.strided]

    def _made(self, storage: torch.UntypedStorage) -> Made:
        key = id_without_memory(storage)
        if key not in self._followed:
            number, size = len(self.log.made), storage.nbytes()
            self._followed[key] = number, size, weakref.ref(storage, lambda _: self._freed(key))
            self.log.made.append(Made(self._comms.module, in_backward()))
            self.log.events.append((number, size))
        return self.log.made[self._followed[key][0]]

    def _freed(self, key: int) -> None:
        number, size, _ = self._followed.pop(key)
        self.log.events.append((number, -size))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size: FSDP frees and fills what it gathers so, and nobody else does."""
        key = id_without_memory(storage)
        (self._emptied.discard if storage.nbytes() else self._emptied.add)(key)
        if key in self._followed:
            number, before, reference = self._followed[key]
            self.log.made[number].of_fsdp = True
            self.log.events.append((number, storage.nbytes() - before))
            self._followed[key] = number, storage.nbytes(), reference
