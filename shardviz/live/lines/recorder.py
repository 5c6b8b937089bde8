"""Record every call inside a module: inputs, outputs, tensors written to, and gradients.

A `TorchFunctionMode` sees torch's functions, a `TorchDispatchMode` the collectives in them, and `Function.apply` is
replaced while a module runs. Hooks only read. What torch calls inside of its own functions is one call, and so is a
compiled module.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.live.claims.registry import of_tensor, unwrapped
from shardviz.live.compat.modules import class_name, clean_name, compiled_calls_wrapped, is_compiled, replaced
from shardviz.live.compat.tensors import in_backward, version_of
from shardviz.live.compat.worlds import COLLECTIVES, collective_called, ranks_of_operator
from shardviz.live.lines.events import (
    SENT_BACK,
    Before,
    Event,
    Value,
    Ways,
    aliased,
    edges_of,
    has_memory,
    real_of,
    storage_of,
    tensors_kept,
)
from shardviz.live.lines.frames import frames_of
from shardviz.live.step.comms import collective_name, is_communication
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn


MAX_ELEMENTS = 1 << 22
"""Once so many numbers are kept on a rank, no more values are; a value that is kept has its gradient kept, too."""

MAX_CALLS = 8
"""Of a module that is called more often, the first calls are kept."""

MAX_ARGUMENTS = 32
"""Numbers among the arguments of a call that are kept."""

MAX_HELD = 1 << 28
"""Once tensors with so many numbers are held, no more calls are recorded: a recorder holds what it has numbered."""

UNSEEN = ("wait_tensor", "_wrap_tensor_autograd", "grad", "register_hook")
"""Functions that compute nothing, or wait for what is computed."""


@dataclass
class Recorder:
    """What was recorded of a module.

    Attributes:
        module: The module; None for a whole step.
        events: Its calls, in order.
        values: Their tensors, by number.
        returned: The numbers of the tensors that each call of the module returned.
        keeps_all: Whether calls without a line of the user's are kept, too.
        guarded: Calls a function of the recorder's; in a job it lets no error through.
        results: What a whole step leaves, by name, with the number of the tensor.
    """

    module: nn.Module | None
    events: list[Event] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    returned: list[tuple[int, ...]] = field(default_factory=list)
    keeps_all: bool = False
    guarded: Callable[..., Any] = lambda function, *args: function(*args)
    results: dict[str, int] = field(default_factory=dict)
    _known: dict[int, Value] = field(default_factory=dict)
    _epochs: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, list[Value]] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _depth: int = 0
    _made: list[tuple[tuple[int, ...], list[torch.Tensor]]] = field(default_factory=list)
    _num_elements: int = 0
    _num_held: int = 0
    _first: list[Event] | None = None
    _writers: dict[int, Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let what each reader of a tensor sends back be kept apart."""
        self._ways = Ways(self._share)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Record nothing in this context: it is inside of one call."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def is_inside(self) -> bool:
        """Whether what runs now is part of a call that is recorded as one."""
        return self._depth > 0 or self.is_full

    @property
    def is_full(self) -> bool:
        """Whether it holds so much that it records no more."""
        return self._num_held > MAX_HELD

    def stop(self) -> None:
        """Record no more."""
        self._num_held = MAX_HELD + 1

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward pass is running."""
        return in_backward()

    def number(self, tensor: torch.Tensor, origin: str = "") -> int:
        """Return a tensor's number, a new one if it was not seen before or was written into since."""
        self._complete(tensor)
        traced = self._known.get(id(tensor))
        if traced is None or not self._is_current(traced):
            writer = self._writers.get(storage_of(tensor)) if traced is not None else None
            origin = origin or self._names.get(id(tensor), "") or ("elsewhere" if writer is None else "")
            traced = self._known[id(tensor)] = self._new(tensor, origin)
            if writer is not None and not origin:  # it wrote through a view of this tensor
                writer.outputs = (*writer.outputs, traced.number)
        self._follow(traced)
        return traced.number

    def numbers(self, tensors: Any) -> tuple[int, ...]:
        """Return the numbers of the tensors in some arguments."""
        return tuple(self.number(tensor) for tensor in tensors_kept(tensors))

    def before(self, call_inputs: Any) -> Before:
        """Return what is to be known of a call's arguments once it has run."""
        tensors = tensors_kept(call_inputs)
        inputs = self.numbers(tensors)
        self._made.clear()
        return Before(inputs, [version_of(tensor) for tensor in tensors], edges_of(tensors), len(self.events))

    def after(self, function: str, before: Before, call_inputs: Any, returned: Any) -> None:
        """Record a call after it has run, given what was there before it."""
        is_later = bool(self._made) and returned is not None
        self.noted(function, before.inputs, call_inputs, returned, before.versions, wait=is_later)
        inside = [] if in_backward() else self.events[before.num_events :]
        readers = {
            number: next((event for event in inside if number in event.inputs), None) for number in before.inputs
        }
        if any(readers.values()):
            self._ways.add(readers, before.inputs, before.edges, tensors_kept((returned, call_inputs), wait=False))

    def _share(self, event: Event, number: int) -> Callable[[torch.Tensor | None], None]:
        """Return what keeps the gradients that a call sends back to a tensor."""
        value = Value(len(self.values), self.values[number].tensor, (0, 0), 0, SENT_BACK)
        self.values.append(value)
        event.sent = (*event.sent, (number, value.number))
        return lambda gradient: self.guarded(self._came_back, value, gradient)

    def noted(
        self,
        function: str,
        inputs: tuple[int, ...],
        call_inputs: Any,
        returned: Any,
        versions: Sequence[tuple[int, int]],
        *,
        wait: bool,
    ) -> None:
        """Record a call after it has run.

        Args:
            inputs: The numbers of what it was given.
            versions: The versions of the tensors in its arguments before it ran.
            wait: Whether values may come later: its collective is not waited for yet.
        """
        arguments = tensors_kept(call_inputs)
        by_collectives = {id(tensor) for _, tensors in self._made for tensor in tensors}
        written = [
            tensor
            for tensor, version in zip(arguments, versions, strict=True)
            if version_of(tensor) != version or id(tensor) in by_collectives
        ]
        for tensor in written:
            self._epochs[storage_of(tensor)] = self._epochs.get(storage_of(tensor), 0) + 1
        before = len(self.values)
        returned_tensors = tensors_kept(returned, wait=False)
        outputs = tuple(dict.fromkeys(self._output(tensor, wait=wait) for tensor in (*returned_tensors, *written)))
        ranks = next((ranks for ranks, _ in self._made), ())
        self._made.clear()
        if any(number >= before for number in outputs):
            frames = frames_of(self.module)
            sides = inputs, outputs, ranks, _is_collective(function, ranks), _numbers_in(call_inputs)
            if frames[0] or self.keeps_all:
                self.events.append(Event(len(self.returned), function, frames, *sides))
                self._writers.update((storage_of(tensor), self.events[-1]) for tensor in written)

    def check(self, func: Any, args: tuple[Any, ...]) -> None:
        """Look at an operator that communicates before it runs."""

    def collective(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note a collective that runs inside of a call: its ranks, and what it writes into."""
        is_functional = "functional" in str(func)
        self._made.append((ranks_of_operator(func, args), [] if is_functional else list(tensors_in(args[0]))))

    def _output(self, tensor: torch.Tensor, *, wait: bool) -> int:
        traced = self._known.get(id(tensor))
        if traced is None or not self._is_current(traced):
            traced = self._known[id(tensor)] = self._new(tensor, "", wait=wait)
        self._follow(traced)
        return traced.number

    def _new(self, tensor: torch.Tensor, origin: str, *, wait: bool = False) -> Value:
        storage = storage_of(tensor)
        value = Value(len(self.values), tensor, version_of(tensor), self._epochs.get(storage, 0), origin)
        self.values.append(value)
        self._num_held += tensor.numel()
        if wait:
            self._waiting.setdefault(storage, []).append(value)
        else:
            self._copy(value)
        return value

    def _complete(self, tensor: torch.Tensor) -> None:
        """Copy what collectives have written into a tensor's storage: whoever reads it has waited for them."""
        for value in self._waiting.pop(storage_of(tensor), ()):
            self._copy(value)

    def _copy(self, value: Value) -> None:
        with torch.no_grad():
            local = of_tensor("", "activation", value.tensor)
            value.shape = tuple(local.values.shape)
            if local.claim is not None:
                mesh, placements = local.claim
                value.placements, value.axes = ", ".join(map(str, placements)), mesh.axes
            if self._num_elements + local.values.numel() <= MAX_ELEMENTS and has_memory(local.values):
                value.values = real_of(local.values).clone()
                self._num_elements += value.values.numel()

    def _is_current(self, value: Value) -> bool:
        tensor = value.tensor
        return value.version == version_of(tensor) and value.epoch == self._epochs.get(storage_of(tensor), 0)

    def _follow(self, value: Value) -> None:
        """Keep the gradient that comes back to a tensor; not a weight's, which is compared after the step."""
        is_without = not (torch.is_grad_enabled() and value.tensor.requires_grad)  # in an autograd.Function's forward
        if is_without or value.needs_grad or value.origin.startswith("weight"):
            return
        value.needs_grad = True
        value.tensor.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: self.guarded(self._came_back, value, gradient)
        )

    def _came_back(self, value: Value, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        with torch.no_grad(), self.quiet():
            local = real_of(of_tensor("", "activation", gradient).values)
            if value.gradient is not None:
                value.gradient = value.gradient + local
            elif value.values is not None:
                value.gradient = local.clone()
            elif value.origin == SENT_BACK and self._num_elements + local.numel() <= MAX_ELEMENTS:
                value.shape, value.gradient = tuple(local.shape), local.clone()
                self._num_elements += local.numel()

    def begin(self, inputs: Any, named: Any) -> None:
        """Begin a call of the module."""
        if in_backward():
            self._first, self.events = self.events, []
        module = self.module
        named_tensors = () if module is None else (module.named_parameters(), module.named_buffers())
        for kind, tensors in zip(("weight", "buffer"), named_tensors, strict=False):
            self._names |= {id(tensor): f"{kind} {clean_name(name)}" for name, tensor in tensors}
        for at, tensor in enumerate(tensors_kept((inputs, named))):
            self.number(tensor, f"input {at}")

    def end(self, output: Any) -> None:
        """End a call of the module."""
        returned = self.numbers(output)
        for waiting in list(self._waiting.values()):
            self._complete(waiting[0].tensor)
        if self._first is None:
            self.returned.append(returned)
        else:
            self.end_recomputation()

    def end_recomputation(self) -> None:
        """End a recomputation, which `checkpoint` stops as soon as it has what backward needs."""
        if self._first is None:
            return
        again, self.events, self._first = self.events, self._first, None
        without = [event for event in self.events if not any(self.values[at].needs_grad for at in event.outputs)]
        for first, second in zip(without[-len(again) :], again, strict=False):
            for of_first, of_second in zip(first.outputs, second.outputs, strict=False):
                self.values[of_first].again = self.values[of_second]


class _Functions(TorchFunctionMode):
    """Hands torch's functions to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if self.recorder.is_inside or name in UNSEEN:
            return func(*args, **kwargs)
        return recorded(self.recorder, name, partial(func, *args, **kwargs), (args, kwargs))


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands the collectives among torch's operators to a recorder, with their functions if no other mode saw those."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_communication(func):
            self.recorder.check(func, args)
        run = partial(func, *args, **(kwargs or {}))
        if not collective_name(func):
            return run()

        def noted() -> Any:
            returned = run()
            self.recorder.guarded(self.recorder.collective, func, args)
            return returned

        called = None if self.recorder.is_inside else collective_called()
        return noted() if called is None else recorded(self.recorder, called[0], noted, called[1])


def recorded(
    recorder: Recorder, name: str, function: Callable[[], Any], call_inputs: Any, *, opaque: bool = True
) -> Any:
    """Run a function and record it; what it calls is part of it if it is opaque."""
    with recorder.quiet():
        before = recorder.guarded(recorder.before, call_inputs)
        if opaque:
            returned = function()
    if not opaque:
        returned = function()
    with recorder.quiet():
        if before is not None:
            recorder.guarded(recorder.after, name, before, call_inputs, returned)
    return returned


@contextmanager
def recording(
    model: nn.Module,
    name: str,
    guarded: Callable[..., Any] = lambda function, *args: function(*args),
    *,
    is_alone: bool = False,
) -> Iterator[Recorder]:
    """Record the calls of a module of a model that runs inside of this context.

    Args:
        model: The model; the hooks on its modules are removed at the end.
        is_alone: Whether the module gets aliases of its inputs, whose gradients are what this module alone sends back.
    """
    inner = unwrapped(model)
    module = {clean_name(own): module for own, module in inner.named_modules()}.get(name)
    if module is None:  # another stage's
        yield Recorder(inner)
        return
    recorder, modes = Recorder(module, guarded=guarded), ExitStack()
    modes_on: list[bool] = []

    def enter() -> None:
        modes.enter_context(collecting(recorder))
        modes_on.append(True)
        modes.callback(modes_on.clear)

    def begin(_module: Any, inputs: Any, named: Any) -> Any:
        if len(recorder.returned) >= MAX_CALLS:
            return None
        given = aliased(inputs, named) if is_alone else (inputs, named)
        recorder.guarded(recorder.begin, *given)
        enter()
        return given

    def end(_module: Any, _inputs: Any, output: Any) -> None:
        if len(recorder.returned) < MAX_CALLS:
            modes.close()
            recorder.guarded(partial(recorder.end, output) if output is not None else recorder.end_recomputation)

    def alone(name: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not modes_on:
                return compiled(*args, **kwargs)
            modes.close()
            output = compiled(*args, **kwargs)
            enter()
            return recorded(recorder, name, lambda: output, (args, kwargs))

        return call

    with ExitStack() as handles:
        for submodule in module.modules():
            if submodule is not module and is_compiled(submodule):
                wrapped = partial(alone, class_name(submodule))
                handles.enter_context(compiled_calls_wrapped(submodule, wrapped))
        handles.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
        handles.callback(module.register_forward_hook(end, always_call=True).remove)
        yield recorder


@contextmanager
def collecting(recorder: Recorder) -> Iterator[None]:
    """Let a recorder see torch's functions, collectives and `autograd.Function`s."""
    function = torch.autograd.Function
    original = vars(function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = partial(original.__get__(None, cls), *args, **kwargs)
        if recorder.is_inside:
            return run()
        is_torchs = cls.__module__.startswith("torch.distributed")
        name = COLLECTIVES.get(cls.__name__, cls.__name__) if is_torchs else cls.__name__
        return recorded(recorder, name, run, (args, kwargs), opaque=is_torchs)

    with replaced(function, "apply", classmethod(apply)), _Collectives(recorder), _Functions(recorder):
        yield


def _name(func: Any) -> str:
    """Return a function's name; of a property the property's."""
    name = (getattr(func, "__name__", "") or str(func)).removeprefix("fft_")
    if name in ("__get__", "__set__"):
        name = (resolve_name(func) or name).split(".")[-2]
    return name.partition(".")[0] if not name.startswith("__") else name.strip("_")


def _numbers_in(call_inputs: Any) -> str:
    """Write the numbers among some arguments, in order."""
    numbers: list[str] = []
    waiting = [call_inputs]
    while waiting and len(numbers) < MAX_ARGUMENTS:
        argument = waiting.pop(0)
        if isinstance(argument, slice):
            waiting[:0] = [argument.start, argument.stop, argument.step]
        elif isinstance(argument, dict | list | tuple):
            waiting[:0] = list(argument.values() if isinstance(argument, dict) else argument)
        elif isinstance(argument, int | float):
            numbers.append(repr(argument))
    return " ".join(numbers)


def _is_collective(name: str, ranks: Sequence[int]) -> bool:
    """Whether a function is a collective: of the names that tensors' own functions have too, if it has ranks."""
    if name in ("broadcast", "gather", "reduce", "scatter"):
        return bool(ranks)
    return name.startswith(("all_gather", "all_reduce", "all_to_all", "reduce_scatter"))
