"""What comes of a traced step of a job: the weights after it, and what the steps that follow it are given.

A job that goes wrong in an optimizer, by a schedule or by its data, agrees with another one in the step that is traced.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from msgspec import structs

from shardviz.dump.records.step import GivenRecord
from shardviz.live.claims import registry
from shardviz.live.claims.registry import local_tensors, unwrapped
from shardviz.live.compat.meshes import local_of
from shardviz.live.compat.modules import clean_name
from shardviz.live.compat.tensors import bytes_of, is_captured
from shardviz.live.run.hooks.observing import quietly
from shardviz.live.run.outside import has_copies
from shardviz.live.run.references.values import living_modules, living_optimizers, outermost
from shardviz.live.run.step_files import WHAT, Step, weights_of
from shardviz.live.step.running import tensors_in
from shardviz.live.step.steppers import Options, options_records, parameters_of, steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn
    from torch.optim import Optimizer

    from shardviz.live.claims.local import Local
    from shardviz.live.run.outside import Averages
    from shardviz.live.run.step_files import Written

MAX_STEPS = 16
"""So many steps are followed, the traced one among them."""

MAX_TENSORS, MAX_ROWS = 16, 1 << 12
"""Of so many tensors of a step, and so many rows of each, the checksums are kept."""
MAX_OUTPUTS, MAX_WIDTH = 256, 1 << 16
"""Of so many rows of a step's output, and so many elements of each, a sum is kept."""
ROWS_AT_ONCE = 16
NOT_FINITE = sys.float_info.max / 4
"""What stands for a sum that is NaN or infinite."""
MAX_COPIED = 1 << 22
"""A larger output whose rows do not lie one behind the other is not read."""


class LaterSteps:
    """Follows a model's calls and its optimizers from the traced step on."""

    def __init__(self, module: nn.Module, hook: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Follow a module's calls."""
        self._step: Step | None = None
        self._written: Written | None = None
        self._averages: Averages | None = None
        self._after: list[Local] = []
        self._changed: list[Local] = []  # since then, before the next step
        self._buffers: list[Local] = []
        self._given: list[GivenRecord] = []
        self._shapes: list[tuple[int, ...]] = []
        self._rows: list[tuple[int, ...]] = []
        self._outputs: list[tuple[int, float, float]] = []
        self._num_kept, self._is_watched = 0, False  # parameters that have a gradient as the step's backward begins
        self._num_before = 0  # how many tensors of the step the calls before the last were given
        self._has_other_model: bool | None = None  # that the job trains; not known before the first call
        self._is_stepped = False
        self._new_at = -1  # the step at which a new model began
        self._done: set[int] = set()  # optimizers that have made the current step
        self._has_after = False
        self._hooks = hook(self._called), hook(self._returned)
        self._handles: list[Any] = []
        self._follow(module)

    def _follow(self, module: nn.Module) -> None:
        for handle in self._handles:
            handle.remove()
        begun, returned = self._hooks
        self._handles = [
            module.register_forward_pre_hook(begun, with_kwargs=True, prepend=True),
            module.register_forward_hook(returned),
        ]

    def made(self, optimizer: Optimizer) -> None:
        """Go on with the model of a new optimizer if it is like the traced one, and in its place."""
        if self._step is None or steps(optimizer, self._step.root):
            return
        stepped = set(map(id, parameters_of(optimizer)))
        owners = (
            module for module in living_modules() for own in module.parameters(recurse=False) if id(own) in stepped
        )
        owner = next(owners, None)
        model = outermost(owner) if owner is not None else None
        if model is not None and _shapes(model) == _shapes(self._step.root):
            self._follow(model)
            self._step, self._new_at = replace(self._step, root=model), len(self._given)

    @property
    def root(self) -> nn.Module | None:
        """The model as the job calls it; None before the traced step ends, and after the last."""
        return self._step.root if self._step is not None else None

    def begin(self, step: Step, written: Written | None) -> None:
        """Begin with the traced step, which ends as its optimizer's step begins."""
        self._step, self._written, self._averages = step, written, step.averages
        self._add(step.options)

    def stepping(self, optimizer: Optimizer, options_of: Callable[[nn.Module], Options]) -> None:
        """Note that an optimizer begins a step, and with what; no call is seen before one of a compiled model."""
        if self._step is not None and not is_captured() and steps(optimizer, self._step.root):
            if id(optimizer) in self._done:
                self._take_averages()
                self._begin_step()
            self._add(options_of(self._step.root))

    def stepped(self, optimizer: Optimizer) -> None:
        """Keep the weights that the optimizers of the traced step leave, and the buffers if no step follows."""
        if self._step is None or is_captured() or not steps(optimizer, self._step.root):
            return
        self._done.add(id(optimizer))
        if len(self._given) == 1 and not has_copies(self._step.root):  # which are written to the weights later
            self._after = weights_after(self._step)
            self._buffers = self._step.buffers.written_after()  # the job may still synchronize them

    def end(self) -> None:
        """Follow the module no longer, and write what was seen.

        As the process ends this may hold the last reference to a model, and its wrapper the last one to its process
        group, whose thread must be able to take the GIL to end: writing lets it, before the model is let go.
        """
        for handle in self._handles:
            handle.remove()
        if self._step is not None:
            quietly(WHAT, self._take_copied)
            step, self._step = self._step, None
            self._write()
            del step

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or is_captured():
            return
        if self._is_stepped:
            self._take_copied()
            self._take_averages()
            if not self._has_after:
                if self._step is not None:
                    self._note_between(module, self._step)
                self._write()
            self._begin_step()
        if self._has_other_model is None:
            self._has_other_model = any(not steps(optimizer, module) for optimizer in living_optimizers())
        self._num_before = len(self._rows)
        tensors = (tensor for tensor in tensors_in((args, kwargs)) if type(tensor) is torch.Tensor and tensor.numel())
        for tensor in islice((tensor for tensor in tensors if tensor.ndim), MAX_TENSORS - len(self._rows)):
            is_made = self._has_other_model and tensor.is_floating_point()  # and rounding decides about its last bits
            checksums = () if is_made else _checksums(tensor.detach()[:MAX_ROWS])
            self._shapes.append(tuple(tensor.shape))
            self._rows.append(checksums)

    def _returned(self, _: nn.Module, args: Any, output: Any) -> None:
        """Keep what the model makes of each row; of rows that are the same, two jobs should make the same."""
        self._watch_backward(output)
        checksums = self._rows[self._num_before :]
        num_rows, room = len(checksums[0]) if checksums else 0, MAX_OUTPUTS - len(self._outputs)
        if not num_rows or room <= 0 or not torch.is_grad_enabled() or is_captured():
            return
        tensors = (tensor for tensor in tensors_in(output) if type(tensor) is torch.Tensor)
        first = next((tensor for tensor in tensors if tensor.shape[:1] == (num_rows,)), None)
        if first is not None and first.is_floating_point() and (first.is_contiguous() or first.numel() <= MAX_COPIED):
            keys = zip(*(of_tensor for of_tensor in checksums if len(of_tensor) == num_rows), strict=True)
            with torch.no_grad():
                self._outputs += islice(_sums(first.detach()[:room], keys), room)

    def _watch_backward(self, output: Any) -> None:
        """Note as the step's first backward begins which gradients the step before left."""
        tensors = (tensor for tensor in tensors_in(output) if tensor.requires_grad)
        first = next(tensors, None) if self._given and not self._is_watched and not is_captured() else None
        if first is not None:
            self._is_watched = True
            first.register_hook(lambda _: quietly(WHAT, self._note_kept))  # type: ignore[no-untyped-call]

    def _note_kept(self) -> None:
        """Count the parameters that backward will add to."""
        if self._step is not None and not self._num_kept:
            self._num_kept = len(with_gradients(registry.named_parameters(unwrapped(self._step.root))))

    def _note_between(self, module: nn.Module, step: Step) -> None:
        """Keep what changed between the traced step and the next forward, which calls a module first."""
        self._changed = self._changed_since(step) if self._new_at < 0 else []
        is_drawn, first = step.buffers.is_drawn, _name_of(module, step)
        self._given[0] = structs.replace(self._given[0], draws_after=is_drawn, followed_by=first)
        self._buffers = [*step.buffers.written_after(), *step.buffers.after()]

    def _begin_step(self) -> None:
        self._shapes, self._rows, self._outputs, self._is_stepped = [], [], [], False
        self._num_kept, self._is_watched = 0, False
        self._done.clear()

    def _add(self, options: Options) -> None:
        """Add a step, or what a further optimizer steps in it."""
        if self._is_stepped:
            self._given.pop()
        self._is_stepped = True
        is_new = len(self._given) == self._new_at
        self._given.append(
            GivenRecord(
                tuple(self._shapes),
                tuple(self._rows),
                tuple(options_records(options)),
                is_new,
                outputs=tuple(self._outputs),
                kept_gradients=self._num_kept,
            )
        )
        if len(self._given) == MAX_STEPS:
            self.end()

    def _changed_since(self, step: Step) -> list[Local]:
        """Return copies of the weights that something has changed since the optimizers left them."""
        after = {local.name: local.values for local in self._after if local.role == "param"}
        now = (local for local in weights_after(step) if local.name in after)
        return [local for local in now if not torch.equal(bytes_of(local.values), bytes_of(after[local.name]))]

    def _take_averages(self) -> None:
        """Keep the averages of weights that the traced step leaves: a job makes them before its next step."""
        if self._averages is not None and len(self._given) == 1:
            self._after += quietly(WHAT, list, self._averages.now()) or []
            self._averages = None

    def _take_copied(self) -> None:
        """Keep the weights that the traced step leaves, if copies are stepped in their place."""
        if self._step is not None and len(self._given) == 1 and not self._after and not self._has_after:
            self._after, self._buffers = weights_after(self._step), self._step.buffers.written_after()

    def _write(self) -> None:
        self._take_averages()
        if self._written is not None:
            self._written([*self._after, *self._buffers], self._changed, self._given)
        self._after, self._buffers, self._changed, self._has_after = [], [], [], True


def with_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the names of parameters that have a gradient already, which the next backward will add to."""
    with torch.no_grad():
        gradients = {name: local_of(parameter.grad) for name, parameter in parameters if parameter.grad is not None}
        flags = [gradient.any() for gradient in gradients.values()]
        are_any = (
            torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
        )  # reads them at once: each wait costs time on a GPU
        return [name for name, is_any in zip(gradients, are_any, strict=True) if is_any]


def weights_after(step: Step) -> list[Local]:
    """Return copies of the weights that a step's optimizers step, as they are now."""
    return weights_of([*local_tensors(unwrapped(step.root)), *step.outside.tensors()], step.most)


def _name_of(called: nn.Module, step: Step) -> str:
    """Return the name of a called module in the model; empty for the model itself, in any wrapper."""
    names = {id(module): name for name, module in unwrapped(step.root).named_modules()}
    return clean_name(names.get(id(unwrapped(called)), ""))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model, in any wrapper."""
    return {clean_name(name): tuple(param.shape) for name, param in unwrapped(model).named_parameters()}


def _checksums(rows: torch.Tensor) -> tuple[int, ...]:
    """Return the CRC-32 of the bytes of each row; none of a tensor whose bytes cannot be read, such as a sparse one."""
    if rows.layout != torch.strided or rows.is_meta or rows.is_nested:
        return ()
    flat = rows.resolve_conj().resolve_neg().cpu().reshape(len(rows), -1).contiguous()
    return tuple(crc32(row) for row in flat.view(torch.uint8).numpy())


def _sums(rows: torch.Tensor, keys: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, float, float]]:
    """Yield of each row of an output a key, the sum of its elements with fixed weights, and their root mean square.

    Both are `NOT_FINITE` of a row that has NaN or infinity: a file of JSON has neither.
    """
    flat = rows.reshape(len(rows), -1)[:, :MAX_WIDTH]
    weights = torch.cos(1.3 * torch.arange(flat.shape[1], device=flat.device) + 0.5) / math.sqrt(flat.shape[1])
    for start in range(0, len(flat), ROWS_AT_ONCE):  # no matmul, which autocast would round
        numbers = flat[start : start + ROWS_AT_ONCE].float()
        pairs = torch.stack([(numbers * weights).sum(1), numbers.square().mean(1).sqrt()], 1).tolist()
        for pair, key in zip(pairs, keys, strict=False):  # the other way round, a key would be lost at each end
            total, size = pair if all(map(math.isfinite, pair)) else (NOT_FINITE, NOT_FINITE)
            yield crc32(repr((key, rows.shape[1:].numel())).encode()), total, size
