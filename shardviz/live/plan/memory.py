"""Memory of a step besides its weights: each storage is followed until it is freed.

The storages that an operator returns are followed by weak references, so that whatever keeps one counts: autograd, the
inputs of a checkpoint, a list of the model's own. What they are is only known when the step has ended, so the step
writes a log, and `Log.peak` and `Log.kept` add it up afterwards. Scores of attention are told from other storages: a
CPU makes them if it has no fused kernel, and a GPU may have one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from shardviz.dump.records.files import PeakRecord
from shardviz.errors import ProbeError
from shardviz.live.compat.fakes import UnwrappedMode, answered_alone
from shardviz.live.compat.fsdp import flat_gradients_reduced
from shardviz.live.compat.meshes import working_out_shapes
from shardviz.live.compat.modules import replaced
from shardviz.live.compat.tensors import id_without_memory, in_backward, plain_tensors, storages_resized
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from shardviz.live.plan.choices import Choices
    from shardviz.live.step.comms import Comms


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
    """Follows `scaled_dot_product_attention` by a mode, or by name if torch removes modes.

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
        by_name = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        sizes = [tuple(by_name[name].shape[-2:]) for name in ("query", "key", "value")]
        before = self._pairs, self._products, self._is_known_by_shape
        self._pairs, self._products = (sizes[0][0], sizes[1][0]), 0
        self._is_known_by_shape = self._pairs not in sizes
        try:
            return ATTENTION(*args, **kwargs)
        finally:
            self._pairs, self._products, self._is_known_by_shape = before

    def note(self, func: Any, value: Any, *, in_backward: bool) -> bool:
        """Note an operator's result, and return whether it has a score for each query and key.

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


ALIASES = (ATEN.detach.default, ATEN.alias.default, ATEN.view.default)
"""Operators that make another tensor of the same memory, which torch allows of memory that is freed."""

OF_ONE_DTYPE = {
    ATEN.mm.default: (0, 1),
    ATEN.mv.default: (0, 1),
    ATEN.addmm.default: (0, 1, 2),
    ATEN.convolution.default: (0, 1, 2),
    ATEN.index_put.default: (0, 2),
    ATEN.index_put_.default: (0, 2),
    ATEN.index_add.default: (0, 3),
}
"""Operators that refuse operands of two element types if they have values, and not if they have none: which.

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
        events: For each change the storage, and by how many bytes it grew or shrank; None at the end of a forward that
            was waited for.
    """

    events: list[tuple[Made, int] | None] = field(default_factory=list)

    def peak(self) -> PeakRecord:
        """Return the moment at which most was held."""
        activations = gathered = scores = fused = 0
        most = PeakRecord()
        for storage, size in filter(None, self.events):
            if storage.is_state:
                continue
            gathered += size if storage.of_fsdp else 0
            activations += 0 if storage.of_fsdp else size
            scores += size if storage.is_score else 0
            fused = max(fused, activations + gathered - scores)
            if activations + gathered > most.activations + most.gathered:
                most = PeakRecord(activations, gathered, storage.module, storage.in_backward, scores)
        return replace(most, fused=fused) if most.scores else most

    def kept(self) -> Counter[str]:
        """Return the bytes that wait for backward by module, at the forward's end that has most."""
        now: Counter[str] = Counter()
        most: Counter[str] = Counter()
        for event in self.events:
            if event is None:
                most = Counter(now) if now.total() > most.total() else most
            elif not (event[0].is_state or event[0].of_fsdp):
                now[event[0].module] += event[1]
        return most


class Watched(UnwrappedMode):
    """Follows storages while a model runs, records collectives, and works out choices.

    One mode does all of that: an operator that goes through four modes takes twice as long.

    Args:
        passes: The modules whose forwards are what is waited for: the stages of a pipeline, or the model itself.
        comms: Records collectives, and knows which module is running.
        buckets: Those of DistributedDataParallel, which are there when the step has ended.
        choices: Gives choices numbers; None if tensors have values.

    Attributes:
        log: What was made and freed.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: Iterable[nn.Module],
        comms: Comms,
        buckets: Sequence[torch.Tensor] = (),
        choices: Choices | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choices = choices
        self._model = model
        self._passes = tuple(passes)
        self._comms = comms
        self._buckets = buckets
        self._followed: dict[int, tuple[Made, int, weakref.ref[Any]]] = {}
        self._emptied: set[int] = set()
        self._stack = ExitStack()
        self._only_shapes: Callable[[], bool] = bool
        self._reduces_flat: Callable[[], bool] = bool
        self._attention = Attention()
        self.log = Log()

    def __enter__(self) -> Watched:
        self._mark_state()
        for module_pass in self._passes:
            self._stack.callback(module_pass.register_forward_hook(lambda *_: self.log.events.append(None)).remove)
        self._stack.enter_context(storages_resized(self._note_resized))
        self._stack.callback(register_optimizer_step_pre_hook(lambda *_: self._mark_state()).remove)
        self._stack.callback(
            register_optimizer_step_post_hook(lambda of, *_: self._mark(list(of.state.values()))).remove
        )
        self._stack.enter_context(self._attention.following())
        self._only_shapes = self._stack.enter_context(working_out_shapes())
        self._reduces_flat = self._stack.enter_context(flat_gradients_reduced(self._mark_flat))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()
        self._mark_state()
        self._followed.clear()  # what is freed from now on is not of the step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and see what it sends, chooses and makes."""
        if (answer := answered_alone(func, args)) is not None:
            return answer
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then its operators on plain tensors come by, one after the other
        kwargs = kwargs or {}
        if self._only_shapes():
            return func(*args, **kwargs)
        self._refuse_freed(func, args)
        self._refuse_dtypes(func, args)
        self._comms.note(func, args, kwargs)
        if func.__name__.startswith("wait_tensor"):
            return args[0]  # without values a new tensor is returned, with values the same one
        returned = func(*args, **kwargs) if self._choices is None else self._choices.run(func, args, kwargs)
        self._follow(func, args, kwargs, returned)
        return returned

    def _follow(self, func: Any, args: Any, kwargs: Any, returned: Any) -> None:
        """Follow the storages that an operator made."""
        takes_all = getattr(func, "namespace", "") == "fsdp"
        is_of_fsdp = takes_all or self._reduces_flat()
        for storage in self._made_in([returned, args, kwargs] if takes_all else returned):
            storage.of_fsdp = storage.of_fsdp or is_of_fsdp
            storage.is_score = storage.is_score or self._attention.note(func, returned, in_backward=storage.in_backward)
            if func is ATEN.cat.default and storage.in_backward:
                storage.parts = self._made_in(args)

    def _refuse_freed(self, func: Any, args: Any) -> None:
        """Refuse reading memory that FSDP freed in backward; torch notices only with values."""
        if not self._emptied or func in ALIASES or not in_backward():
            return
        for argument in args:
            if isinstance(argument, torch.Tensor) and argument.layout == torch.strided and argument.numel():
                storage = argument.untyped_storage()
                if id_without_memory(storage) in self._emptied and not storage.nbytes():
                    raise ProbeError(FREED)

    def _refuse_dtypes(self, func: Any, args: Any) -> None:
        """Refuse operands of different element types if only an operator with values does."""
        if func in OF_ONE_DTYPE:
            operands = [args[at] for at in OF_ONE_DTYPE[func]]
            dtypes = dict.fromkeys(str(operand.dtype) for operand in operands if operand is not None)
            if len(dtypes) > 1:
                raise RuntimeError(f"{func.__name__.partition('.')[0]}() of {' and '.join(dtypes)}")

    def _mark_flat(self, gradient: torch.Tensor | None) -> None:
        """Mark a flat gradient that FSDP1 is about to reduce, and its weights' gradients."""
        for storage in self._made_in(gradient):
            storage.of_fsdp = True
            for bucket_part in storage.parts:
                bucket_part.of_fsdp = True

    def _mark_state(self) -> None:
        """Mark weights and gradients, both from before a step and their replacements."""
        weights = (*self._model.parameters(), *self._model.buffers())
        self._mark([*weights, *(weight.grad for weight in weights), *self._buckets])

    def _mark(self, state: Any) -> None:
        for made in self._made_in(state):
            made.is_state = True

    def _made_in(self, value: Any) -> list[Made]:
        """Return the storages of all tensors in a value, which are followed from now on."""
        plain = [part for tensor in tensors_in(value) for part in plain_tensors(tensor)]
        return [self._made_of(tensor.untyped_storage()) for tensor in plain if tensor.layout == torch.strided]

    def _made_of(self, storage: torch.UntypedStorage) -> Made:
        key = id_without_memory(storage)
        if key not in self._followed:
            storage_record, size = Made(self._comms.module, in_backward()), storage.nbytes()
            self._followed[key] = storage_record, size, weakref.ref(storage, lambda _: self._note_freed(key))
            self.log.events.append((storage_record, size))
        return self._followed[key][0]

    def _note_freed(self, key: int) -> None:
        made, size, _ = self._followed.pop(key)
        self.log.events.append((made, -size))

    def _note_resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage was resized, which only FSDP does to free and fill it."""
        key = id_without_memory(storage)
        (self._emptied.discard if storage.nbytes() else self._emptied.add)(key)
        if key in self._followed:
            storage_record, before, reference = self._followed[key]
            storage_record.of_fsdp = True
            self.log.events.append((storage_record, storage.nbytes() - before))
            self._followed[key] = storage_record, storage.nbytes(), reference
