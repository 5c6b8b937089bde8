"""Recorder of every module call's inputs and outputs in a step, with their gradients.

A gradient is that of the tensor: if several modules read one, it is the sum of what they send back. Values are
copied, so that a later in-place operation does not change them. Hooks only read; they do not wrap tensors, which would
make in-place operations raise. Inside of what `torch.compile` compiled nothing is followed: a region is one module.
Nothing is judged here: `judge` asks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import starmap
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from msgspec import structs

from shardviz.dump.records.trace import KeptRecord, of_point
from shardviz.live.claims import registry
from shardviz.live.claims.local import Local
from shardviz.live.claims.registry import of_tensor
from shardviz.live.compat.modules import clean_name, is_compiled
from shardviz.live.compat.tensors import bytes_of, has_storage, in_backward, is_captured, tensor_behind
from shardviz.live.step.return_values import Returned, is_array
from shardviz.live.step.running import tensors_in
from shardviz.live.trace_modules import ALL, NONE, Followed
from shardviz.relate.tolerance import ELEMENT, EXACT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from shardviz.dump.records.trace import Again, What
    from shardviz.live.capture.capture import Capture


MAX_ELEMENTS = 1 << 24
"""Once this many elements are kept of one step on one rank, nothing more is: 64 MiB in float32."""

MAX_ARGUMENTS = 16
"""Of what else one call is given, the first numbers, masks and tensors of whole numbers are kept."""

MAX_OF_ARGUMENT = 1 << 20
"""A tensor with more elements than this is not kept as such an argument."""

MAX_TENSORS = 8
"""Of what goes in or out of one call, the first tensors of floating point are kept."""

Source = tuple["ref[torch.Tensor]", int]
"""What leads to a tensor while it is there, and the version that was seen."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """What a module is given as backward runs it again; it keeps no tensor, as the run may end early.

    Attributes:
        inputs: What leads to its tensors of floating point.
        hooked: What is kept of them.
        arguments: Its numbers, masks and whole numbers.
    """

    inputs: list[ref[torch.Tensor]]
    hooked: list[Seen]
    arguments: dict[str, torch.Tensor]


@dataclass
class Seen:
    """One tensor, as it went in or out of a module.

    Attributes:
        values: This rank's part, copied; None if too much was kept before it.
        needs_grad: Whether a gradient can flow back to it.
        gradient: This rank's part of its gradient; None if none came back.
        shape: The shape of this rank's part, even if only a sample of it is kept.
        local: The same values with the placements that the tensor claims.
        changed: Whether it had other values in backward, a tensor on its device: something wrote into it without a new
            version, which autograd does not see. None if that wasn't looked at.
    """

    values: torch.Tensor | None
    needs_grad: bool
    number: int
    gradient: torch.Tensor | None = None
    shape: tuple[int, ...] = ()
    local: Local | None = None
    changed: torch.Tensor | None = None

    @property
    def is_overwritten(self) -> bool:
        """Whether it had other values in backward; waits for its device."""
        return self.changed is not None and bool(self.changed)


@dataclass(slots=True)
class Call:
    """One call of a module in forward, with what went in and out of it.

    Attributes:
        is_tensor: Whether it returned one tensor, and not several.
        arguments: The numbers, masks and whole numbers that it was given, by the names that its forward has for them.
        is_without_graph: Whether gradients were switched off, as in the first run of a checkpointed module.
        again: What differed as backward ran it again.
    """

    inputs: list[Seen]
    outputs: list[Seen]
    is_tensor: bool = False
    arguments: dict[str, torch.Tensor] = field(default_factory=dict)
    is_without_graph: bool = False
    again: Again = ""


@dataclass
class Trace:
    """What a step's modules were given and returned.

    Attributes:
        calls: The calls of every module in order, by name; the model itself is the empty name.
        order: The names of modules as their calls ended.
        types: The class of every module.
        is_paused: Whether what runs now is not part of the step.
        num_elements: How many elements are kept.
        num_left_out: How many tensors are not, because too much was kept before them.
        followed: Which modules are followed.
        copied: Copies a tensor, or a part of a large one.
        keeps_arguments: Whether it keeps what modules are given besides tensors of floating point.
        batches: The whole numbers that the model was given, call by call: tokens, which no gradient flows to.
        draws: For every module whether each of its calls drew random numbers, if that was watched.
    """

    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    order: list[str] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    is_paused: Callable[[], bool] = lambda: False
    num_elements: int = 0
    num_left_out: int = 0
    followed: Followed = NONE
    copied: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    keeps_arguments: bool = True
    batches: list[list[tuple[tuple[int, ...], torch.Tensor]]] = field(default_factory=list)
    draws: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    _open: dict[str, list[list[Seen]]] = field(default_factory=lambda: defaultdict(list))
    _count: int = 0
    _known: dict[int, tuple[Any, int, Seen]] = field(default_factory=dict)
    _arguments: dict[str, list[dict[str, torch.Tensor]]] = field(default_factory=lambda: defaultdict(list))
    _copies: dict[int, tuple[Any, int, torch.Tensor]] = field(default_factory=dict)
    _again: dict[str, list[Rerun]] = field(default_factory=lambda: defaultdict(list))

    @property
    def is_full(self) -> bool:
        """Whether no more is kept."""
        return self.num_elements >= MAX_ELEMENTS

    @property
    def left_out(self) -> str:
        """What was not kept, in a sentence; empty if all that was asked for was."""
        if self.followed not in (ALL, NONE) and not any(self.types):
            return f"the step's modules: none of them is called {self.followed.pattern!r}, which --trace names"
        if not self.num_left_out:
            return ""
        return (
            f"{self.num_left_out:,} of the step's activations and gradients: {MAX_ELEMENTS:,} numbers were kept before "
            "them; follow some modules with --trace 'modules=PATTERN'"
        )

    def follow(self, model: nn.Module, followed: Followed) -> Iterator[Any]:
        """Hook a model's followed modules; yield the handles that remove the hooks."""
        self.followed = followed
        for name, module in _modules_of(model):
            if not followed.includes(name):
                continue
            self.types[name] = type(module).__name__
            yield module.register_forward_pre_hook(self._begin(name), prepend=True, with_kwargs=True)
            yield module.register_forward_hook(self._end(name))

    def _begin(self, name: str) -> Callable[..., None]:
        def begin(module: Any, inputs: Any, named: Any) -> None:
            if in_backward():
                self._again[name].append(self._run_again(name, module, inputs, named))
            elif not self.is_paused():
                self._open[name].append(self._seen((inputs, named)))
                self._arguments[name].append(dict(self._given(module, inputs, named)))

        return begin

    def _end(self, name: str) -> Callable[..., None]:
        def end(_module: Any, _inputs: Any, output: Any) -> None:
            if in_backward():
                self._recomputed(name, output)
            elif self._open[name]:
                sides = self._open[name].pop(), self._seen(output), torch.is_tensor(output)
                arguments = self._arguments[name].pop() if self._arguments[name] else {}
                self.calls[name].append(Call(*sides, arguments, not torch.is_grad_enabled()))
                self.order.append(name)

        return end

    def _given(self, module: nn.Module, inputs: Any, named: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of a call's arguments that are no tensors of floating point, by name."""
        if not self.keeps_arguments:
            return
        try:
            bound = signature(module.forward).bind(*inputs, **named).arguments
        except (TypeError, ValueError):  # its forward has no signature, or the call will raise
            return
        for path, tensor in list(Returned.safely(bound, detached=False).tensors.items())[:MAX_ARGUMENTS]:
            is_number = not tensor.ndim and tensor.dtype == torch.float64
            is_whole = is_array(tensor) and not tensor.is_floating_point() and tensor.numel() <= MAX_OF_ARGUMENT
            copied = self._copy_of(tensor) if is_number or is_whole else None
            if copied is not None:
                yield path.removeprefix("."), copied

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a tensor, the same one for all modules that it is given to; None if too much is kept."""
        cached = self._copies.get(id(tensor))
        if cached is None or tensor_behind(cached[0]) is not tensor or cached[1] != tensor._version:
            if self.is_full:
                self.num_left_out += 1
                return None
            copied = of_tensor("", "activation", tensor).values.clone()
            cached = self._copies[id(tensor)] = ref(tensor), tensor._version, copied
            self.num_elements += copied.numel()
        return cached[2]

    def _seen(self, tensors: Any) -> list[Seen]:
        return [self._seen_once(tensor) for tensor in _floating(tensors)]

    def _seen_once(self, tensor: torch.Tensor) -> Seen:
        """Return what is kept of a tensor, once if it goes through several modules unchanged."""
        cached = self._known.get(id(tensor))
        if cached is not None and tensor_behind(cached[0]) is tensor and cached[1] == tensor._version:
            return cached[2] if cached[2].needs_grad >= tensor.requires_grad else self._with_graph(tensor, cached[2])
        with torch.no_grad():
            local = of_tensor("", "activation", tensor)
            # Copied as a plain tensor, because cloning a DTensor with a pending sum makes the sum.
            copied = None if self.is_full else self.copied(local.values)
            local_copy = None if copied is None else replace(local, values=copied, grad=None)
            tensor_seen = Seen(
                copied, tensor.requires_grad, self._count, shape=tuple(local.values.shape), local=local_copy
            )
            self._count += 1
        self.num_elements += 0 if copied is None else copied.numel()
        self.num_left_out += tensor_seen.values is None
        self._known[id(tensor)] = ref(tensor), tensor._version, tensor_seen
        self._hook(tensor, tensor_seen)
        return tensor_seen

    def _with_graph(self, tensor: torch.Tensor, seen: Seen) -> Seen:
        """Return what is kept of a tensor that got its graph later, as what a checkpointed module returned does."""
        tensor_seen = replace(seen, needs_grad=True)
        self._known[id(tensor)] = ref(tensor), tensor._version, tensor_seen
        self._hook(tensor, tensor_seen)
        return tensor_seen

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy these tensors anew when they come next: something wrote into them without a new version."""
        for tensor in tensors:
            self._known.pop(id(tensor), None)

    def _hook(self, tensor: torch.Tensor, seen: Seen) -> None:
        if tensor.requires_grad:
            came_back = partial(self.came_back, seen, (ref(tensor), tensor._version))
            tensor.register_hook(came_back)  # type: ignore[no-untyped-call]

    def _changed(self, seen: Seen, source: Source) -> torch.Tensor | None:
        """Return whether a tensor has other values than its readers saved for backward; None if that isn't known."""
        tensor, version = tensor_behind(source[0]), source[1]
        if seen.values is None or tensor is None or tensor._version != version or is_captured():
            return None
        values = of_tensor("", "activation", tensor).values
        is_there = has_storage(values) and values.untyped_storage().size() > 0 and tuple(values.shape) == seen.shape
        return (bytes_of(self.copied(values)) != bytes_of(seen.values)).any() if is_there else None

    def _look_again(self, seen: Seen, source: Source) -> None:
        """Note whether a tensor was written into since it was seen."""
        try:
            changed = self._changed(seen, source)
        except Exception:  # a subclass or a device without such an operator: no error may reach the user's backward
            return
        if changed is not None:
            seen.changed = changed if seen.changed is None else seen.changed | changed

    def came_back(self, tensor_seen: Seen, source: Source, gradient: torch.Tensor | None) -> None:
        """Keep the gradient of a tensor, or add it to what came back before; a Function may send back None."""
        with torch.no_grad():
            self._look_again(tensor_seen, source)
        if gradient is None:
            return
        if self.is_full:
            self.num_left_out += 1
            return
        with torch.no_grad():
            addend = self.copied(of_tensor("", "activation", gradient).values)
            tensor_seen.gradient = addend if tensor_seen.gradient is None else tensor_seen.gradient + addend
        self.num_elements += addend.numel()

    def _hooked(self, tensor: torch.Tensor) -> Seen:
        """Follow the gradient of a tensor whose values are known already."""
        tensor_seen = Seen(
            None, tensor.requires_grad, -1, shape=tuple(of_tensor("", "activation", tensor).values.shape)
        )
        self._hook(tensor, tensor_seen)
        return tensor_seen

    def _run_again(self, name: str, module: nn.Module, inputs: Any, named: Any) -> Rerun:
        tensors = list(_floating((inputs, named)))
        is_asked = any(call.is_without_graph for call in self.calls.get(name, []))
        arguments = dict(self._given(module, inputs, named)) if is_asked else {}
        return Rerun([ref(tensor) for tensor in tensors], [self._hooked(tensor) for tensor in tensors], arguments)

    def _recomputed(self, name: str, output: Any) -> None:
        """Follow gradients of a call that activation checkpointing runs again."""
        if not self._again[name]:
            return
        rerun, outputs = self._again[name].pop(), list(_floating(output))
        call = self._first_run(name, rerun, outputs)
        if call is not None:
            _complete(call.inputs, rerun.hooked)
            _complete(call.outputs, [self._hooked(tensor) for tensor in outputs])

    def _first_run(self, name: str, rerun: Rerun, outputs: Sequence[torch.Tensor]) -> Call | None:
        """Return the call that is run again: the last without gradients that returned the same numbers.

        If none did, the last that was run on tensors of these shapes is run again otherwise. If any of those had a
        graph, as with `use_reentrant=False`, that may be the one, and it is left alone.
        """
        calls = self.calls.get(name, [])
        without = [call for call in reversed(calls) if any(not one.needs_grad for one in call.outputs)]
        values = self._copies_of(outputs)
        again = next((call for call in without if _are_equal(call.outputs, values)), None)
        if again is not None:
            return again
        alike = [call for call in calls if _are_alike(call.inputs, rerun.hooked)]
        otherwise = next((call for call in without if _are_alike(call.inputs, rerun.hooked)), None)
        if otherwise is None or not all(call.is_without_graph for call in alike):
            return None
        if not _are_close(otherwise.outputs, values):
            otherwise.again = self._differing(otherwise, rerun)
        return otherwise

    def _differing(self, call: Call, rerun: Rerun) -> Again:
        """Return the side on which a call differs as it is run again; empty if its inputs are not known."""
        inputs = [tensor for source in rerun.inputs if (tensor := tensor_behind(source)) is not None]
        if len(inputs) < len(rerun.inputs) or not (inputs or rerun.arguments):
            return ""
        both = [(call.arguments[path], values) for path, values in rerun.arguments.items() if path in call.arguments]
        is_same = all(starmap(torch.equal, both)) and _are_close(call.inputs, self._copies_of(inputs))
        return "outputs" if is_same else "inputs"

    def _copies_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self.copied(of_tensor("", "activation", tensor).values) for tensor in tensors]


def _complete(sides: list[Seen], again: Sequence[Seen]) -> None:
    """Put the tensors of a second run in the place of those of the first that had no graph."""
    for at, (first, second) in enumerate(zip(sides, again, strict=False)):
        if not first.needs_grad and second.needs_grad:
            second.values, second.number = first.values, first.number
            sides[at] = second


def _are_equal(side: Sequence[Seen], values: Sequence[torch.Tensor]) -> bool:
    """Whether a call was given, or returned, some values, as far as these were kept."""
    pairs = [(seen.values, value) for seen, value in zip(side, values, strict=False) if seen.values is not None]
    return all(seen.shape == value.shape and torch.equal(seen, value) for seen, value in pairs)


def _are_close(side: Sequence[Seen], values: Sequence[torch.Tensor]) -> bool:
    """Whether a side has some values but for rounding, as what a reversible layer computes back has."""
    pairs = [(seen.values, value) for seen, value in zip(side, values, strict=False) if seen.values is not None]
    return all(seen.shape == value.shape and _is_close(seen, value) for seen, value in pairs)


def _is_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors differ by less than a step's rounding of the largest element, or not at all if it is NaN."""
    near = ELEMENT.get(str(first.dtype).removeprefix("torch."), EXACT)
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    first, second = first.to(wide), second.to(wide)
    largest = float(first.nan_to_num(0.0, 0.0, 0.0).abs().max()) if first.numel() else 0.0
    return torch.allclose(second, first, rtol=0.0, atol=near * largest, equal_nan=True)


def _are_alike(side: Sequence[Seen], hooked: Sequence[Seen]) -> bool:
    """Whether a call was given tensors of these shapes, and all of them were kept."""
    return [seen.shape for seen in side] == [seen.shape for seen in hooked] and all(
        seen.values is not None for seen in side
    )


def _modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by name, those inside of a compiled one left out.

    A wrapper, as of FSDP1, has the name of what it wraps, whose calls are the unsharded model's.
    """
    compiled: tuple[str, ...] = ()
    modules: dict[str, nn.Module] = {}
    names = registry.module_names(model)
    for name, module in model.named_modules():
        if not name.startswith(compiled or "\n"):
            modules[names.get(clean_name(name), clean_name(name))] = module
        if is_compiled(module):
            compiled = (*compiled, f"{name}." if name else "")
    yield from modules.items()


def _floating(tensors: Any) -> Iterable[torch.Tensor]:
    found = [tensor for tensor in tensors_in(tensors) if tensor.is_floating_point() and is_array(tensor)]
    return found[:MAX_TENSORS]


def add_points(capture: Capture, trace: Trace) -> None:
    """Add the inputs and outputs of every call of a trace, and the gradients of both.

    Args:
        capture: Where to; a tensor that goes through several modules is written once.
    """
    names: dict[int, str] = {}
    sides: tuple[tuple[What, What], ...] = (("input", "gradient of input"), ("output", "gradient of output"))
    for order, (name, number, call) in enumerate(_in_order(trace)):
        draws = trace.draws[name][number : number + 1] == [True]
        record = KeptRecord(name, "input", order, number, type=trace.types.get(name, ""), draws=draws)
        record = structs.replace(record, is_without_graph=call.is_without_graph, again=call.again)
        for index, (argument, values) in enumerate(call.arguments.items()):
            argument_record = structs.replace(record, what="argument", index=index, argument=argument)
            _add(capture, names, argument_record, (values, values, 0))
        for side, tensors in zip(sides, (call.inputs, call.outputs), strict=True):
            for index, tensor in enumerate(tensors):
                tensor_record = structs.replace(
                    record,
                    index=index,
                    tensor=max(tensor.number, 0),
                    needs_grad=tensor.needs_grad,
                    is_overwritten=tensor.is_overwritten,
                )
                _add(capture, names, structs.replace(tensor_record, what=side[0]), (tensor, tensor.values, 0))
                _add(capture, names, structs.replace(tensor_record, what=side[1]), (tensor, tensor.gradient, 1))
    for number, batch in enumerate(trace.batches):
        for index, (shape, values) in enumerate(batch):
            capture.kept.append(KeptRecord("", "batch", 0, number, index))
            capture.add_values(Local(of_point("", "batch", number, index), "activation", shape, values), "step")


def _in_order(trace: Trace) -> Iterator[tuple[str, int, Call]]:
    """Yield the calls of a step as they ended, each with its number among those of its module."""
    done: dict[str, int] = {}
    for name in trace.order:
        number = done.get(name, 0)
        done[name] = number + 1
        yield name, number, trace.calls[name][number]


def _add(
    capture: Capture,
    names: dict[int, str],
    record: KeptRecord,
    side: tuple[Seen | torch.Tensor, torch.Tensor | None, int],
) -> None:
    """Record a tensor, or its gradient, at a place; its values once, however many modules it goes through."""
    tensor, values, is_gradient = side
    name = of_point(record.module, record.what, record.call, record.index)
    first_name = names.setdefault(2 * id(tensor) + is_gradient, name)
    capture.kept.append(structs.replace(record, same_as=first_name if first_name != name else ""))
    if values is not None and first_name == name:
        capture.add_values(Local(name, "activation", tuple(tensor.shape), values), "step")
