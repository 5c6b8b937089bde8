"""One step of a running job, followed through its modules, for `shardviz run --trace`.

A `Follower` waits for the step and ends it; the hooks of a `JobTrace` only read, and none of them may raise in
somebody's job or be compiled into what runs. Ranks do not talk to each other here: each writes its own file, and
`shardviz diff` lays two jobs side by side.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from msgspec import structs
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardviz.dump.arrays.sample import kept_indices, strides_for
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RunRecord
from shardviz.dump.records.step import ClipRecord
from shardviz.dump.write import write_rank, write_run
from shardviz.layout.mesh import AXIS_NAME
from shardviz.live.capture.capture import Capture
from shardviz.live.capture.locals import Local, held_back_names, local_tensors, unwrapped
from shardviz.live.claims.wrappers import reducing
from shardviz.live.compat import asks_for_shapes, default_store, groups_here, in_backward, is_compiled, parts_of_norm
from shardviz.live.lines.job_lines import JobLines
from shardviz.live.randomness import random_states
from shardviz.live.run.hooks.arming import arm, disarm
from shardviz.live.run.hooks.observing import nested, quietly, report
from shardviz.live.run.outside import outside
from shardviz.live.run.references.values import contains, outermost, parameters_of
from shardviz.live.run.references.writing import is_first_here, rank_here
from shardviz.live.step.optimizer_settings import options_of, options_records
from shardviz.live.step.running import tensors_in
from shardviz.live.step.trace.recorder import MAX_ELEMENTS, Trace, add_points
from shardviz.live.trace_modules import Followed
from shardviz.versions import package_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from shardviz.live.run.options import Options
    from shardviz.live.run.outside import Outside
    from shardviz.live.step.optimizer_settings import Options as Settings
    from shardviz.live.step.trace.recorder import Seen


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is being followed.

    Attributes:
        root: The model as the job calls it.
        trace: What its modules were given and returned.
        number: Which optimizer step it is, counted from 1.
        most: Of each weight and its gradient no more elements are kept.
        weights: This rank's part of the weights before the step.
        outside: What is stepped with the model and is not in it.
        broke_off: Whether the job raised in it: what backward left in gradients may not be reduced yet.
        lines: What was recorded line by line; None if nothing was asked for.
        options: The numbers with which optimizers step its parameters.
        clips: The norms by which its gradients were clipped.
    """

    root: nn.Module
    trace: JobTrace
    number: int
    most: int
    weights: Sequence[Local]
    outside: Outside
    broke_off: bool = False
    lines: JobLines | None = None
    options: Settings = field(default_factory=dict)
    clips: list[ClipRecord] = field(default_factory=list)

    @property
    def is_compiled(self) -> bool:
        """Whether modules of it are in a compiled graph, which calls no hook."""
        return any(map(is_compiled, self.root.modules()))


def weights_of(tensors: Iterable[Local], most: int) -> list[Local]:
    """Return copies of a model's parameters, of large ones a sample."""
    return [
        replace(local, values=sampled(local.values, most), grad=None)
        for local in tensors
        if local.role == "param" and not local.values.is_meta
    ]


def write_step(step: Step, folder: Path, command: tuple[str, ...], problem: str) -> None:
    """Write this rank's file, and on the first rank of each disk that of the run.

    Args:
        step: What was seen.
        folder: Where to; it is made.
        command: The job's, for the record.
        problem: Why the step has no end; empty if it has one.
    """
    rank, num_ranks = rank_here(), distributed.get_world_size() if distributed.is_initialized() else 1
    capture = Capture(rank, num_ranks, run_id=_run_id(), steps_before=step.number - 1)
    capture.wrappers = [*reducing(step.root), *step.outside.wrappers()]
    if step.trace.uncalled:
        capture.wrappers = [
            structs.replace(wrapper, kind="bypassed") if wrapper.kind != "fsdp" else wrapper
            for wrapper in capture.wrappers
        ]
    for local in (*step.weights, *(() if step.broke_off else _gradients(step))):
        capture.add_values(local, "step")
    add_points(capture, step.trace)
    capture.options, capture.clips = options_records(step.options), step.clips
    capture.held_back = [] if problem else held_back_names(unwrapped(step.root))
    if step.lines is not None:
        quietly(WHAT, step.lines.add_to, capture)
    for name, ranks in groups_of(num_ranks):
        capture.add_group(name, ranks)
    if problem:
        unseen = "the end of the step and the gradients of weights" if step.broke_off else "the end of the step"
        capture.not_checked.append(("", f"{unseen}: {problem}"))
    if step.trace.left_out:
        capture.not_checked.append(("", step.trace.left_out))
    if step.is_compiled:
        capture.not_checked.append(("", COMPILED))
    folder.mkdir(exist_ok=True)
    if is_first_here(folder, "trace folder"):
        write_run(
            folder,
            RunRecord(
                SCHEMA, package_version("shardviz"), package_version("torch"), num_ranks, command, run_id=capture.run_id
            ),
        )
    write_rank(folder, capture.record(), capture.dense)


def groups_of(num_ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield this rank's groups that are smaller than the job, each with an axis's name."""
    for name, ranks in groups_here() if distributed.is_initialized() else ():
        axis = name.removeprefix("mesh_")
        if len(ranks) < num_ranks:
            yield axis if AXIS_NAME.fullmatch(axis) and axis != "undefined" else f"groups_of_{len(ranks)}", ranks


def _run_id() -> str:
    """Return the run's id, which the first rank to ask puts into the job's store."""
    run_id = secrets.token_hex(8)
    if distributed.is_initialized():
        with suppress(RuntimeError):
            return str(default_store().compare_set("shardviz/trace", "", run_id).decode())
    return run_id


def _gradients(step: Step) -> Iterator[Local]:
    for local in (*local_tensors(unwrapped(step.root)), *step.outside.tensors()):
        if local.role == "param" and local.grad is not None:
            claim = local.grad_claim or local.claim
            values = sampled(local.grad.detach(), step.most)
            yield replace(local, role="grad", values=values, grad=None, claim=claim)


SIDES = 4
"""Inputs, outputs and the gradients of both; many are the same tensors."""

FEWEST, MOST = 1 << 10, 1 << 18
"""Of a tensor at least and at most so many elements are kept, as many as leaves room for every module."""

MAX_GIVEN = 64
"""Of whole numbers that the model is given, such as tokens, so many tensors are kept."""


WHAT = "the trace of a step"

COMPILED = (
    "what modules take and return inside torch.compile, whose graph has no modules; run the job with "
    "TORCH_COMPILE_DISABLE=1 to record them"
)


class JobTrace(Trace):
    """The trace of one step of a job."""

    def __init__(self, num_modules: int) -> None:
        super().__init__()
        self.most = most_of(num_modules * SIDES)
        self.copied = self._sampled
        self.uncalled: set[nn.Module] = set()  # DistributedDataParallel, while its forward was not called
        self._states: defaultdict[str, list[list[torch.Tensor]]] = defaultdict(list)
        self._given_to: str | None = None  # whose batch is kept

    def _sampled(self, tensor: torch.Tensor) -> torch.Tensor:
        return sampled(tensor, self.most)

    def _begin(self, name: str) -> Callable[..., None]:
        begin = super()._begin(name)

        def begin_all(module: Any, inputs: Any, named: Any) -> None:
            if asks_for_shapes(inputs):
                return  # a pipeline's stage, run on values without a meaning
            begin(module, inputs, named)
            if not in_backward():
                self._states[name].append(random_states())
            self._keep_given(name, (inputs, named))

        return _without_errors(begin_all)

    def _end(self, name: str) -> Callable[..., None]:
        end = super()._end(name)

        def end_all(module: Any, inputs: Any, output: Any) -> None:
            end(module, inputs, output)
            if self._states[name] and not in_backward():
                before, after = self._states[name].pop(), random_states()
                self.draws[name].append(not (len(before) == len(after) and all(map(torch.equal, before, after))))

        return _without_errors(end_all)

    def came_back(self, seen: Seen, gradient: torch.Tensor) -> None:
        """Keep the gradient of a tensor."""
        quietly(WHAT, super().came_back, seen, gradient)

    def _keep_given(self, name: str, inputs: Any) -> None:
        """Keep the whole numbers that the model is given; those of the module called first while it is not called.

        Lightning runs the methods of the trained module, which calls another one, rather than that itself.
        """
        if not name and self._given_to:
            self.batches.clear()
        if self._given_to is None or not name:
            self._given_to = name
        if name != self._given_to:
            return
        whole = [
            tensor
            for tensor in tensors_in(inputs)
            if not tensor.is_floating_point() and not tensor.is_complex() and tensor.ndim
        ]
        if len(self.batches) < MAX_GIVEN:
            self.batches.append([(tuple(tensor.shape), self._sampled(tensor.detach())) for tensor in whole])


def _without_errors(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that never raises, and that `torch.compile` leaves out of what it compiles."""

    def call(*given: Any) -> None:
        if not torch.compiler.is_compiling():
            quietly(WHAT, hook, *given)

    return call


def most_of(num_tensors: int) -> int:
    """Return the elements kept of each of several tensors: a power of 2 that bounds the total."""
    room = MAX_ELEMENTS // max(num_tensors, 1)
    return min(max(1 << max(room.bit_length() - 1, 0), FEWEST), MOST)


def sampled(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a copy of a tensor, or of a sample of a larger one."""
    strides = strides_for(tensor.shape, most)
    parts = tuple(
        slice(kept_indices(size, stride).start, None, stride)
        for size, stride in zip(tensor.shape, strides, strict=True)
    )
    return tensor[parts].clone() if parts else tensor.clone()


class Follower:
    """Follows one step of a model.

    Attributes:
        options: What is asked for.
        write: Writes what was seen of the step; given also why the step has no end, if it has none.
        model: The model; by default the first that an optimizer steps whose making is seen.
    """

    def __init__(self, options: Options, write: Callable[[Step, str], None], model: nn.Module | None = None) -> None:
        self.options = options
        self.write = write
        self.model = model
        self.followed = Followed.parse(options.trace, of_job=True)
        self._lines = JobLines(self.followed.lines, report) if self.followed.lines is not None else None
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._handles: list[Any] = []
        self._step: Step | None = None
        self._is_over = False
        self._is_of_many = False
        self._process = os.getpid()

    def optimizing(self, optimizer: Optimizer) -> None:
        """Look at the steps of an optimizer, and at the calls of modules until the step begins."""
        if self._is_over or os.getpid() != self._process:
            return
        if not self._optimizers:
            self.begin()
            self._begin_lines(0)
        self._optimizers.add(optimizer)

    def clipped(self, norm: Any, limit: Any) -> None:
        """Keep the norm by which gradients of the step are clipped, and what it was given as the most.

        Of a DTensor it is this rank's part: to read the whole takes a collective.
        """
        if self._step is None or os.getpid() != self._process:
            return
        if isinstance(norm, DTensor):
            parts = parts_of_norm(norm)
            records = [ClipRecord(float(norm.to_local()), float(limit), *parts)] if parts is not None else []
            self._step.clips.extend(records)
        elif type(norm) is torch.Tensor:
            self._step.clips.append(ClipRecord(float(norm), float(limit)))

    def _begin_lines(self, num_taken: int) -> None:
        """Record the script's lines from the end of the step before on."""
        if self._lines is not None and not self._is_over and num_taken == self.options.trace_step - 1:
            self._lines.begin()

    def begin(self) -> None:
        """Wait for the step."""
        self._watch_steps()
        arm(self.visit)

    def _watch_steps(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        # The hooks stay: torch walks over them while it calls them, and raises if one is removed meanwhile.
        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            return quietly(WHAT, self._before_step, optimizer, args, kwargs)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            quietly(WHAT, self._end_with, optimizer)  # it may have called no closure
            self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
            quietly(WHAT, self._begin_lines, self._taken[optimizer])

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
        atexit.register(quietly, WHAT, self._end_with_process)

    def visit(self, module: nn.Module) -> None:
        """Begin if the called module is the trained model or part of it, and its step has come."""
        if self._step is not None or self._is_over or os.getpid() != self._process:
            return
        with nested() as is_outermost:
            if is_outermost and torch.is_grad_enabled() and self._is_trained(module):
                self._follow(outermost(module) if self.model is None else self.model, module)

    def _is_trained(self, module: nn.Module) -> bool:
        trainable = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        optimizers = [*self._optimizers, *self._taken]
        own_optimizers = [
            optimizer for optimizer in optimizers if not trainable.isdisjoint(map(id, parameters_of(optimizer)))
        ]
        is_due = (
            max((self._taken.get(optimizer, 0) for optimizer in own_optimizers), default=0)
            == self.options.trace_step - 1
        )
        is_model = bool(own_optimizers) if self.model is None else runs(module, self.model)
        return is_model and is_due and not any(parameter.is_meta for parameter in module.parameters())

    def _follow(self, root: nn.Module, called: nn.Module) -> None:
        disarm(self.visit)
        self._is_of_many = distributed.is_initialized()
        model = unwrapped(root)
        trace = JobTrace(sum(self.followed.includes(name) for name, _ in model.named_modules()))
        outsiders = outside(root, [*self._optimizers, *self._taken])
        before = [*local_tensors(model), *outsiders.tensors()]
        most = most_of(len(before))
        self._step = Step(root, trace, self.options.trace_step, most, weights_of(before, most), outsiders)
        self._handles = list(trace.follow(model, self.followed))
        if self._lines is not None:
            self._step = replace(self._step, lines=self._lines)
            self._lines.follow(root)
        copied = [ddp for ddp in root.modules() if isinstance(ddp, DistributedDataParallel)]
        if not any(contains(called, ddp) for ddp in copied):
            trace.uncalled = set(copied)
            forget = _without_errors(lambda module, *_: trace.uncalled.clear())
            self._handles += [ddp.register_forward_pre_hook(forget) for ddp in copied]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """End the step if its gradients are there; a closure makes them yet, so the step ends when that returns.

        Returns:
            The optimizer's arguments, with a closure that ends the step; None if they stay as they are.
        """
        if self._is_over or os.getpid() != self._process:
            return None
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._ending(optimizer, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._ending(optimizer, args[1]), *args[2:]), kwargs
        self._end_with(optimizer)
        return None

    def _ending(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            returned = closure(*given, **named)
            quietly(WHAT, self._end_with, optimizer)
            return returned

        return call

    def _end_with(self, optimizer: Optimizer) -> None:
        """End the step if this optimizer steps the model, and something of the model was called."""
        if self._step is not None and (self._step.trace.order or self._step.is_compiled):
            parameter_ids = {id(parameter) for parameter in self._step.root.parameters()}
            if not parameter_ids.isdisjoint(map(id, parameters_of(optimizer))):
                quietly(WHAT, self._keep_options, self._step)
                self._finish("")

    def _keep_options(self, step: Step) -> None:
        model = unwrapped(step.root)
        optimizers = [*self._optimizers, *self._taken]
        inner = {id(getattr(optimizer, "optim", None)) for optimizer in optimizers}
        options = [options_of(optimizer, model) for optimizer in optimizers if id(optimizer) not in inner]
        self._step = replace(step, options={name: values for of_each in options for name, values in of_each.items()})

    def _end_with_process(self) -> None:
        if self._is_of_many and not distributed.is_initialized():
            return  # the process groups that would say whose part this is were destroyed
        # Python keeps here what it printed a traceback of.
        raised: BaseException | None = getattr(sys, "last_value", None)
        if raised is None:
            self._finish("no optimizer stepped after it")
        else:
            self._finish(f"the job raised {type(raised).__name__} before an optimizer stepped", broke_off=True)

    def _finish(self, problem: str, *, broke_off: bool = False) -> None:
        step, self._step = self._step, None
        if step is None or os.getpid() != self._process:
            return
        self._is_over = True
        for handle in self._handles:
            handle.remove()
        if self._lines is not None:
            self._lines.end()
        with nested(), torch.no_grad():
            self.write(replace(step, broke_off=broke_off), problem)


def runs(module: nn.Module, model: nn.Module) -> bool:
    """Whether a call of a module is one of a model: of itself, of a wrapper or of a part."""
    return contains(module, model) or contains(model, module)
