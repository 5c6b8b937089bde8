"""One step of a running job, followed through its modules, for `shardviz run --trace`.

A `Follower` waits for the step and ends it; the hooks of a `JobTrace` only read, and none of them may raise in
somebody's job or be compiled into what runs. Ranks do not talk to each other here: each writes its own file, and
`shardviz diff` lays two jobs side by side.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardviz.dump.records.step import ClipRecord
from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.claims import registry
from shardviz.live.compat.meshes import parts_of_norm
from shardviz.live.compat.modules import is_making_states
from shardviz.live.compat.pipelines import asks_for_shapes
from shardviz.live.compat.tensors import at_end_of_backward, in_backward
from shardviz.live.lines.job_lines import JobLines
from shardviz.live.run.hooks.arming import arm, disarm
from shardviz.live.run.hooks.observing import nested, quietly, report
from shardviz.live.run.later_steps import LaterSteps, weights_after, with_gradients
from shardviz.live.run.library_steps import LibraryStep
from shardviz.live.run.outside import Averages, apart_from, buffers_alone, outside
from shardviz.live.run.read_buffers import ReadBuffers
from shardviz.live.run.references.values import contains, outermost
from shardviz.live.run.step_files import WHAT, Step, most_of, sampled, weights_of
from shardviz.live.run.stepped_copies import find_copies, gradients_with_copies
from shardviz.live.step.module_recorder import Seen, Source, Trace
from shardviz.live.step.running import tensors_in
from shardviz.live.step.steppers import Options as Settings
from shardviz.live.step.steppers import identities, options_of, parameters_of, states_of, stepped_by, steps
from shardviz.live.trace_modules import Followed
from shardviz.live.world.group import random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from shardviz.live.run.options import Options

    Shapes = tuple[tuple[int, ...], ...]
    from shardviz.live.run.step_files import Written

SIDES = 4
"""Inputs, outputs and the gradients of both; many are the same tensors."""

NOT_STEPPED = "no optimizer stepped after it"
MAX_GIVEN = 64
"""Of whole numbers that the model is given, such as tokens, so many tensors are kept."""


@dataclass
class _Entered:
    """A call of a module that has not returned.

    Attributes:
        forward: What runs as its forward.
        num_batches: How many batches were kept before it.
        is_around: Whether it ran something that calls the module, rather than the module's own forward.
    """

    forward: Callable[..., Any]
    num_batches: int
    is_around: bool = False


class JobTrace(Trace):
    """The trace of one step of a job."""

    def __init__(self, num_modules: int) -> None:
        super().__init__()
        self.most = most_of(num_modules * SIDES)
        self.copied = self._sampled
        self.keeps_arguments = False
        self.before_backward: Callable[[], None] | None = None  # called once
        self.uncalled: set[nn.Module] = set()  # DistributedDataParallel, while its forward was not called
        self._states: defaultdict[str, list[list[torch.Tensor]]] = defaultdict(list)
        self._given_to: str | None = None  # whose batch is kept
        self._entered: defaultdict[str, list[_Entered]] = defaultdict(list)

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
                self._enter(name, module)
            self._keep_given(name, (inputs, named))

        return _without_errors(begin_all)

    def _end(self, name: str) -> Callable[..., None]:
        end = super()._end(name)

        def end_all(module: Any, inputs: Any, output: Any) -> None:
            if not in_backward() and self._entered[name] and self._entered[name].pop().is_around:
                self._open[name].pop()
                self._states[name].pop()
                return
            end(module, inputs, output)
            if self._states[name] and not in_backward():
                before, after = self._states[name].pop(), random_states()
                self.draws[name].append(not (len(before) == len(after) and all(map(torch.equal, before, after))))

        return _without_errors(end_all)

    def came_back(self, seen: Seen, source: Source, gradient: torch.Tensor | None) -> None:
        """Keep the gradient of a tensor."""
        if self.before_backward is not None:
            begin, self.before_backward = self.before_backward, None
            quietly(WHAT, begin)
        quietly(WHAT, super().came_back, seen, source, gradient)

    def _enter(self, name: str, module: nn.Module) -> None:
        """Note a call; one around it that ran another function than this one is no call of the module's own forward.

        Lightning runs `training_step` as the forward of the module that DistributedDataParallel wraps, and that calls
        the module; in one process it runs `training_step` itself. A recursive module has one forward.
        """
        around = self._entered[name][-1:]
        if around and around[0].forward != module.forward and not around[0].is_around:
            around[0].is_around = True
            if name == self._given_to:
                del self.batches[around[0].num_batches :]
        self._entered[name].append(_Entered(module.forward, len(self.batches)))

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


class Follower:
    """Follows one step of a model.

    Attributes:
        options: What is asked for.
        write: Writes what was seen of the step; given also why the step has no end, if it has none. Returns a function
            that adds the weights after the optimizer's step.
        model: The model; by default the first that an optimizer steps whose making is seen.
    """

    def __init__(
        self, options: Options, write: Callable[[Step, str], Written | None], model: nn.Module | None = None
    ) -> None:
        self.options = options
        self.write = write
        self.model = model
        self.followed = Followed.parse(options.trace, of_job=True)
        self._lines = JobLines(self.followed.lines, report) if self.followed.lines is not None else None
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._num_taken: dict[Shapes, int] = {}
        self._handles: list[Any] = []
        self._step: Step | None = None
        self._is_over = False
        self._later: LaterSteps | None = None
        self._is_of_many = False
        self._searched: WeakSet[nn.Module] = WeakSet()  # models of whose parameters no copies are stepped
        self._library_step: LibraryStep | None = None
        self._process = os.getpid()

    def optimizing(self, optimizer: Optimizer) -> None:
        """Look at the steps of an optimizer, and at the calls of modules until the step begins.

        A job may go on with a new model and optimizer in the place of those that it has stepped: it loads a checkpoint.
        """
        if os.getpid() != self._process:
            return
        if self._is_over:
            if self._later is not None:
                self._later.made(optimizer)
            self._optimizers.add(optimizer)
            return
        if (earlier := self._num_taken.get(_shapes(optimizer))) is not None:
            self._taken[optimizer] = earlier
        if not self._optimizers:
            self.begin()
            self._begin_lines(0)
        self._optimizers.add(optimizer)
        self._searched.clear()

    def clipped(self, norm: Any, limit: Any) -> None:
        """Keep the norm by which gradients of the step are clipped, and what it was given as the most.

        Of a DTensor it is this rank's part: to read the whole takes a collective. No limit clips nothing: Trainer has
        none if it only logs the norm. A norm that is not finite leaves nothing to compare.
        """
        if self._step is None or os.getpid() != self._process:
            return
        is_dtensor = isinstance(norm, DTensor)
        parts = parts_of_norm(norm) if is_dtensor else ((), 2.0)
        if parts is None or not (is_dtensor or type(norm) in (torch.Tensor, float)):
            return
        (ranks, order), own = parts, float(norm.to_local() if is_dtensor else norm)
        if math.isfinite(own) and math.isfinite(limit):
            self._step.clips.append(ClipRecord(own, float(limit), ranks, order if math.isfinite(order) else None))

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
            if self._library_step is None and not is_making_states():
                quietly(WHAT, self._end_with, optimizer)  # it may have called no closure
                self._end_of(optimizer)

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
        atexit.register(quietly, WHAT, self._end_with_process)

    def _end_of(self, optimizer: Optimizer) -> None:
        quietly(WHAT, self._after_step, optimizer)
        self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        if not self._is_over:
            self._num_taken[_shapes(optimizer)] = self._taken[optimizer]
        quietly(WHAT, self._begin_lines, self._taken[optimizer])

    def library_begins(self, stepper: object) -> None:
        """Take the steps that optimizers make from now on as one, which a library makes of them."""
        if os.getpid() == self._process:
            self._library_step = LibraryStep(stepper)

    def library_ends(self, norm: Any, limit: Any) -> None:
        """End the step if an optimizer stepped: the weights are written by now.

        Args:
            norm: The norm by which the library clipped gradients; None if it took none.
            limit: What that may be.
        """
        library_step, self._library_step = self._library_step, None
        if library_step is None or not library_step.optimizers:
            return
        if norm is not None and limit:
            self.clipped(norm, limit)
        self._end_with(library_step.optimizers[-1], library_step)
        for optimizer in dict.fromkeys(library_step.optimizers):
            self._end_of(optimizer)

    def _add_to_library_step(self, optimizer: Optimizer, library_step: LibraryStep) -> None:
        """Keep the gradients that an inner optimizer is about to step with."""
        root = self._step.root if self._step is not None else None
        if self._is_over and self._later is not None:
            root = self._later.root
        with nested(), torch.no_grad():
            library_step.add(optimizer, self._step)
            if root is not None:
                library_step.options |= self._options_of(root, *([states_of] if self._step is not None else []))

    def visit(self, module: nn.Module) -> None:
        """Begin if the called module is the trained model or part of it, and its step has come."""
        if self._step is not None or self._is_over or os.getpid() != self._process:
            return
        with nested() as is_outermost:
            if is_outermost and torch.is_grad_enabled() and self._is_trained(module):
                self._follow(outermost(module) if self.model is None else self.model, module)

    def _is_trained(self, module: nn.Module) -> bool:
        trainable = identities(parameter for parameter in module.parameters() if parameter.requires_grad)
        optimizers = [*self._optimizers, *self._taken]
        own_optimizers = [optimizer for optimizer in optimizers if not trainable.isdisjoint(stepped_by(optimizer))]
        if not own_optimizers and self._find_copies(module):
            return self._is_trained(module)
        is_due = (
            max((self._taken.get(optimizer, 0) for optimizer in own_optimizers), default=0)
            == self.options.trace_step - 1
        )
        is_model = bool(own_optimizers) if self.model is None else runs(module, self.model)
        return is_model and is_due and not any(parameter.is_meta for parameter in module.parameters())

    def _find_copies(self, module: nn.Module) -> bool:
        """Whether optimizers step copies of parameters of the model around a module, which are looked for once."""
        if module in self._searched:
            return False
        root = outermost(module) if self.model is None else self.model
        self._searched.update((module, *root.modules()))
        return find_copies(root, [*self._optimizers, *self._taken])

    def _follow(self, root: nn.Module, called: nn.Module) -> None:
        disarm(self.visit)
        self._find_copies(root)
        self._is_of_many = distributed.is_initialized()
        model = unwrapped(root)
        trace = JobTrace(sum(self.followed.includes(name) for name, _ in model.named_modules()))
        outsiders = outside(root, [*self._optimizers, *self._taken])
        before = [*local_tensors(model), *outsiders.tensors()]
        most = most_of(len(before))
        self._later = LaterSteps(called, _without_errors)
        averages: Averages | None = quietly(WHAT, Averages.of, model, most)
        old = quietly(WHAT, list, averages.now()) if averages is not None else None
        weights = [*weights_of(before, most), *(old or ())]
        beside = quietly(WHAT, buffers_alone, root) or {}
        buffers = ReadBuffers(root, most, beside)
        self._step = Step(root, trace, self.options.trace_step, most, weights, outsiders, buffers, averages=averages)
        note_written = _without_errors(lambda *_: buffers.note_written())
        self._handles = [each.register_forward_hook(note_written) for each in (called, *beside.values())]
        self._handles += trace.follow(model, self.followed)
        trace.before_backward = partial(_note_kept, list(registry.named_parameters(model)), self._step.kept)
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
        if os.getpid() != self._process or (self._is_over and self._later is None) or is_making_states():
            return None
        if self._library_step is None and in_backward():  # a gradient's hook steps its parameter at once
            self._library_step = LibraryStep(None)
            at_end_of_backward(partial(quietly, WHAT, self.library_ends, None, None))
        if self._library_step is not None:
            self._add_to_library_step(optimizer, self._library_step)
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

    def _end_with(self, optimizer: Optimizer, library_step: LibraryStep | None = None) -> None:
        """End the step if this optimizer steps the model, and something of the model was called."""
        if self._is_over and self._later is not None:
            self._later.stepping(optimizer, library_step.options_of if library_step else self._options_of)
        elif (
            self._step is not None
            and (self._step.trace.order or self._step.is_compiled)
            and steps(optimizer, self._step.root)
        ):
            options = (
                library_step.options if library_step else quietly(WHAT, self._options_of, self._step.root, states_of)
            )
            gradients = (
                list(library_step.gradients.values())
                if library_step
                else gradients_with_copies(self._step, self._outermost())
            )
            apart = list(apart_from(self._step.root, [*self._optimizers, *self._taken]))
            optimizers = () if library_step else self._outermost()  # a library's have stepped by now
            self._step = replace(
                self._step, options=options or {}, apart=apart, gradients=gradients, optimizers=optimizers
            )
            self._step.unknown.update(library_step.unknown if library_step else {})
            self._finish("")

    def _options_of(self, root: nn.Module, *others: Callable[[Optimizer, nn.Module], Settings]) -> Settings:
        """Return the numbers with which optimizers step a model's parameters, and what other functions say of them."""
        options: Settings = {}
        for optimizer in self._outermost():
            more = [function(optimizer, unwrapped(root)) for function in others]
            for name, values in options_of(optimizer, unwrapped(root)).items():
                options[name] = options.get(name, {}) | values  # torchtitan's container of optimizers has none itself
                for of_names in more:
                    options[name] |= of_names.get(name, {})
        return options

    def _outermost(self) -> list[Optimizer]:
        """Return the optimizers that no other one has inside of it."""
        optimizers = dict.fromkeys([*self._optimizers, *self._taken])
        inner = {id(getattr(optimizer, "optim", None)) for optimizer in optimizers}
        return [optimizer for optimizer in optimizers if id(optimizer) not in inner]

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._is_over and self._later is not None and os.getpid() == self._process:
            with nested(), torch.no_grad():
                self._later.stepped(optimizer)

    def leaving(self) -> None:
        """End a step that no optimizer took, as the process groups that say whose part this is are about to go.

        A job that raises may destroy them in a `finally`.
        """
        self._end_after(sys.exc_info()[1])

    def _end_with_process(self) -> None:
        if self._is_over and self._later is not None and os.getpid() == self._process:
            self._later.end()
        if self._is_of_many and not distributed.is_initialized():
            return  # the process groups that would say whose part this is were destroyed
        # Python keeps here what it printed a traceback of.
        self._end_after(getattr(sys, "last_value", None))

    def _end_after(self, raised: BaseException | None) -> None:
        if raised is None:
            self._finish(NOT_STEPPED)
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
            written = self.write(replace(step, broke_off=broke_off), problem)
            if self._later is not None and not problem:
                self._later.begin(step, written)
            elif written is not None and problem == NOT_STEPPED:
                written(weights_after(step), (), ())  # another rank's step may have been sent here


def _shapes(optimizer: Optimizer) -> Shapes:
    """Return the shapes of what an optimizer steps."""
    return tuple(tuple(parameter.shape) for parameter in parameters_of(optimizer))


def runs(module: nn.Module, model: nn.Module) -> bool:
    """Whether a call of a module is one of a model: of itself, of a wrapper or of a part."""
    return contains(module, model) or contains(model, module)


def _note_kept(parameters: Sequence[tuple[str, nn.Parameter]], names: list[str]) -> None:
    """Add the names of parameters that have a gradient already, which backward will add to.

    Args:
        parameters: Those of the model before its forward: FSDP2 puts gathered ones in their place, without gradients.
        names: Where to.
    """
    names += with_gradients(parameters)
