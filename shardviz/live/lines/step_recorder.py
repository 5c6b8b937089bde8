"""Record every call of the user's loss, training step and optimizer, around the model's forward and backward.

A call of the model, or of a module in it, is one call. What the step leaves is kept by name: the loss, every gradient,
and what the optimizer makes of gradients and weights.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardviz.dump.records.trace import TO_LOCAL
from shardviz.live.claims.registry import of_tensor, unwrapped
from shardviz.live.compat.modules import class_name, clean_name, is_compiled, replaced
from shardviz.live.compat.tensors import version_of
from shardviz.live.compat.worlds import ranks_of_operator
from shardviz.live.lines.events import Event, Value, has_memory, real_of, storage_of, tensors_kept
from shardviz.live.lines.frames import frames_of
from shardviz.live.lines.recorder import Recorder, collecting, recorded
from shardviz.live.step.step import loss_of
from shardviz.relate.tolerance import EXACT, ROUNDINGS_OF_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from shardviz.live.lines.events import Frames

Memory = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class StepRecorder(Recorder):
    """What was recorded of a step.

    Args:
        model: The model that is stepped; None if it is not known yet.
        is_unsharded: Whether it is the unsharded model, whose loss may be computed by shardviz itself.
        is_alone: Whether the step is the sharded one, on a mesh of this rank alone: it may ask no other rank.
    """

    def __init__(self, model: nn.Module | None, *, is_unsharded: bool = False, is_alone: bool = False) -> None:
        super().__init__(None)
        self._is_alone = is_alone
        self.keeps_all = is_unsharded
        self._modules: set[int] = set()
        self._params: dict[str, nn.Parameter] = {}
        self._by_memory: dict[Memory, Value] = {}
        self._memories: dict[Memory, int] = {}
        self._times_met: Counter[str] = Counter()
        self._is_on = False
        self._num_outputs = 0
        if model is not None:
            self.meet(model)

    def meet(self, model: nn.Module) -> None:
        """Note which model is stepped."""
        self._model = unwrapped(model)
        self._modules = {id(module) for module in model.modules()}
        self._params = {clean_name(name): param for name, param in self._model.named_parameters()}
        for name, param in self._params.items():
            for value in self._traced(param):
                value.origin = f"weight {name}"

    def number(self, tensor: torch.Tensor, origin: str = "") -> int:
        """Return a tensor's number; a tensor in the memory of one that is known has that one's."""
        self._complete(tensor)
        if not origin and id(tensor) not in self._names and not self._traced(tensor):
            self._meet(_memory_of(tensor))
        traced = self._traced(tensor)
        value = next((value for value in traced if self._is_current(value) or self._is_unchanged(value)), None)
        if value is None:
            writer = self._writers.get(storage_of(tensor)) if traced else None
            name = "" if writer is not None else origin or self._named(tensor)
            value = self._known[id(tensor)] = self._new(tensor, name)
            if writer is not None:
                writer.outputs = (*writer.outputs, value.number)
        self._follow(value)
        return value.number

    def _traced(self, tensor: torch.Tensor) -> list[Value]:
        """Return what a tensor was known as, and what its memory was known as last."""
        memory = _memory_of(tensor)
        values = self._known.get(id(tensor)), self._by_memory.get(memory) if memory is not None else None
        return [value for value in values if value is not None]

    def _is_unchanged(self, value: Value) -> bool:
        """Whether a write into the same storage, as of gradients that share one, left a tensor as it was."""
        local = of_tensor("", "activation", value.tensor).values
        if value.values is None or not has_memory(local):
            return False
        local = real_of(local)
        if local.shape != value.values.shape or not torch.equal(value.values, local):
            return False
        value.version, value.epoch = version_of(value.tensor), self._epochs.get(storage_of(value.tensor), 0)
        return True

    def _meet(self, memory: Memory | None) -> None:
        """Number the weight or the gradient that has some memory, or whose part has it."""
        for name, param in self._params.items():
            gradient = None if self.is_in_backward else param.grad
            for kind, tensor in (("weight", param), ("gradient", gradient)):
                if tensor is not None and memory is not None and _memory_of(tensor) == memory:
                    self._names[id(tensor)] = f"{kind} {name}"
                    self.number(tensor)

    def _new(self, tensor: torch.Tensor, origin: str, *, wait: bool = False) -> Value:
        value = super()._new(tensor, origin, wait=wait)
        memory = _memory_of(tensor)
        if memory is not None:
            self._by_memory[memory] = value
            value.memory = self._memories.setdefault(memory, len(self._memories) + 1)
        return value

    def noted(self, function: str, inputs: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Record a call; after a backward, gradients are what that has made of them."""
        super().noted(function, inputs, *args, **kwargs)
        if function == "backward":
            frames = frames_of(None)
            if frames[0]:
                self.events.append(Event(0, function, frames, inputs, ()))
            self._writers.clear()
            self.meet_gradients()

    def check(self, func: Any, args: tuple[Any, ...]) -> None:
        """Let a step on one rank ask no other rank.

        Raises:
            RuntimeError: It would.
        """
        if self._is_alone and len(ranks_of_operator(func, args)) > 1:
            raise RuntimeError(f"{func} asks other ranks")

    def equals(self, whole: StepRecorder) -> bool:
        """Whether a step left what another step left, whole, and all of it."""
        pairs = [(self.results.get(name), number) for name, number in whole.results.items()]
        return all(
            number is not None and _are_equal(self.values[number].values, whole.values[other].values)
            for number, other in pairs
        )

    def meet_gradients(self) -> dict[str, int]:
        """Number every gradient, and return the numbers by name."""
        numbers = {}
        for name, param in self._params.items():
            if param.grad is not None:
                self._names[id(param.grad)] = f"gradient {name}"
                numbers[f"gradient {name}"] = self.number(param.grad)
        return numbers

    def _named(self, tensor: torch.Tensor) -> str:
        """Return the name of a weight or a gradient that is met in a new state, counted from the second time on."""
        name = self._names.get(id(tensor), "elsewhere")
        if not name.startswith("gradient "):
            return name
        self._times_met[name] += 1
        return name if self._times_met[name] == 1 else f"{name} {self._times_met[name]}"

    def end_step(self, loss: torch.Tensor) -> None:
        """Keep the step's loss."""
        for tensor in tensors_kept(loss):
            self.results["loss"] = self.number(tensor)

    def end_backward(self) -> None:
        """Keep the gradients that the step leaves to the optimizer."""
        with self.quiet():
            self.results |= self.meet_gradients()

    def end_update(self, optimizer: Any) -> None:
        """Keep what the optimizer makes of gradients and weights, and its state."""
        with self.quiet():
            self.results |= {f"stepped {name}": number for name, number in self.meet_gradients().items()}
            for name, param in self._params.items():
                self._names[id(param)] = f"weight {name}"
                self.results[f"stepped {name}"] = self.number(param)
            states = getattr(getattr(optimizer, "optim", optimizer), "state", {})
            for name, param in self._model.named_parameters():
                for kind, state in states.get(param, {}).items():
                    if torch.is_tensor(state) and state.ndim:
                        self.results[f"{clean_name(name)}.{kind}"] = self.number(state)

    def on(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function during which calls are recorded."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_on:
                return function(*args, **kwargs)
            self._is_on = True
            try:
                opaque = replaced(nn.Module, "__call__", self._opaque(nn.Module.__call__))
                with opaque, self.watching():
                    returned = function(*args, **kwargs)
            finally:
                self._is_on = False
            return returned

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what is called in this context; a call of a module by what it calls."""
        with replaced(DTensor, "to_local", self._to_local(DTensor.to_local)), collecting(self):
            yield

    def probe(self, probe: ModuleType) -> SimpleNamespace:
        """Return a probe whose functions are recorded.

        Args:
            probe: The probe. Without a loss of its own the unsharded model gets the one that it is compared by.
        """
        functions = {name: getattr(probe, name) for name in ("loss", "step") if hasattr(probe, name)}
        if self.keeps_all or not functions:
            functions["loss"] = lambda model, batch: loss_of(
                probe, model, batch if isinstance(batch, tuple) else (batch,)
            )
            functions.pop("step", None)
        return SimpleNamespace(**{**vars(probe), **{name: self._returning(run) for name, run in functions.items()}})

    def _returning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.quiet():
                for at, tensor in enumerate(tensors_kept(args[1:2])):
                    self.number(tensor, f"input {at}")
            loss = self.on(function)(*args, **kwargs)
            with self.quiet():
                self.end_step(loss)
            return loss

        return run

    def _to_local(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `DTensor.to_local` that keeps the line which takes a weight's part, in the model's forward too."""

        @wraps(original)
        def to_local(tensor: DTensor, **kwargs: Any) -> Any:
            returned = original(tensor, **kwargs)
            if kwargs.get("grad_placements") is None and torch.is_grad_enabled() and not self.is_in_backward:
                frames = frames_of(None)  # none if shardviz looks at a tensor
                if frames[0]:
                    with self.quiet():
                        self.guarded(self._take, tensor, frames)
            return returned

        return to_local

    def _take(self, tensor: DTensor, frames: Frames) -> None:
        """Record that a step takes this rank's part of a tensor, if that is a weight."""
        number = self.number(tensor)
        if self.values[number].origin.startswith("weight"):
            self.events.append(Event(0, TO_LOCAL, frames, (number,), ()))

    def _opaque(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Module.__call__` with the model's modules as one call each."""

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            run = partial(original, module, *args, **kwargs)
            if self.is_inside or id(module) not in self._modules:
                return run()
            output = recorded(self, class_name(module), run, (args, kwargs))
            with self.quiet():
                self.note_output(output)
            return output

        return __call__

    def note_output(self, output: Any) -> None:
        """Note that the model, or a part of it that the step calls, returned some tensors."""
        for at, tensor in enumerate(tensors_kept(output)):
            self.values[self.number(tensor)].origin = f"output {self._num_outputs} {at}"
        self._num_outputs += 1


def _are_equal(held: torch.Tensor | None, whole: torch.Tensor | None) -> bool:
    """Whether two tensors were kept and are equal but for the order of sums."""
    if held is None or whole is None or held.shape != whole.shape:
        return False
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    near = max(EXACT, ROUNDINGS_OF_STEP * torch.finfo(whole.dtype).eps) if whole.is_floating_point() else 0.0
    return not held.numel() or bool(((held - whole).abs() <= near * largest).all())


def _memory_of(tensor: torch.Tensor) -> Memory | None:
    """Return where this rank's part of a tensor stands in memory, and how; None if it has no memory."""
    local = of_tensor("", "activation", tensor).values
    local = getattr(local, "elem", local)
    begin = local.data_ptr()
    return (begin, tuple(local.shape), tuple(local.stride()), local.dtype) if begin else None


def is_recordable(model: nn.Module) -> bool:
    """Whether nothing in a model is compiled: what watches calls would be compiled with it."""
    return not any(map(is_compiled, model.modules()))
