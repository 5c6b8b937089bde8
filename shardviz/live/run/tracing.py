"""One step of a running job, followed through its modules, for `shardviz run --trace`.

A `Follower` waits for the step and ends it. Ranks do not talk to each other here: each writes its own file, and
`shardviz diff` lays two jobs side by side.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardviz.dump.records.step import ClipRecord
from shardviz.live.claims import registry
from shardviz.live.claims.registry import local_tensors, locals_of, unwrapped
from shardviz.live.compat.meshes import parts_of_norm
from shardviz.live.compat.modules import is_making_states
from shardviz.live.compat.tensors import at_end_of_backward, in_backward
from shardviz.live.lines.job_lines import JobLines
from shardviz.live.run.hooks.arming import arm, disarm
from shardviz.live.run.hooks.observing import nested, quietly, report
from shardviz.live.run.job_trace import JobTrace, without_errors
from shardviz.live.run.later_steps import LaterSteps, weights_after, with_gradients
from shardviz.live.run.outside import (
    Averages,
    apart_from,
    buffers_alone,
    find_copies,
    forget_copies,
    gradients_with_copies,
    has_copies,
    has_copies_in,
    outside,
)
from shardviz.live.run.read_buffers import ReadBuffers
from shardviz.live.run.references.values import contains, outermost
from shardviz.live.run.step_files import WHAT, Step, gradients_of, most_of, sampled, weights_of
from shardviz.live.step.steppers import Options as Settings
from shardviz.live.step.steppers import (
    identities,
    names_of_stand_ins,
    options_of,
    parameters_of,
    states_of,
    stepped_by,
    steps,
)
from shardviz.live.trace_modules import Followed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from shardviz.live.run.options import Options

    Shapes = tuple[tuple[int, ...], ...]
    from torch import nn

    from shardviz.live.claims.local import Local
    from shardviz.live.run.step_files import Written


NOT_STEPPED = "no optimizer stepped after it"


class Follower:
    """Follows one step of a model.

    Attributes:
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
                library_step.options |= self._options_of(
                    optimizer, root, *([states_of] if self._step is not None else [])
                )

    def visit(self, module: nn.Module) -> None:
        """Begin if the called module is the trained model or part of it, and its step has come."""
        if self._is_over or os.getpid() != self._process:
            return
        with nested() as is_outermost:
            if not is_outermost or not torch.is_grad_enabled():
                return
            if self._step is not None and has_copies_in(self._step.root, module):
                self._let_go(self._step)
            if self._step is None and self._is_trained(module):
                self._follow(outermost(module) if self.model is None else self.model, module)

    def _is_trained(self, module: nn.Module) -> bool:
        own_optimizers = self._steppers_of(module)
        if not own_optimizers and self._find_copies(module):
            own_optimizers = self._steppers_of(module)
        is_due = (
            max((self._taken.get(optimizer, 0) for optimizer in own_optimizers), default=0)
            == self.options.trace_step - 1
        )
        is_model = bool(own_optimizers) if self.model is None else runs(module, self.model)
        return is_model and is_due and not any(parameter.is_meta for parameter in module.parameters())

    def _steppers_of(self, module: nn.Module) -> list[Optimizer]:
        trainable = identities(parameter for parameter in module.parameters() if parameter.requires_grad)
        optimizers = [*self._optimizers, *self._taken]
        return [optimizer for optimizer in optimizers if not trainable.isdisjoint(stepped_by(optimizer))]

    def _find_copies(self, module: nn.Module) -> bool:
        """Whether optimizers step copies of parameters of the model around a module, which are looked for once."""
        if module in self._searched:
            return False
        root = outermost(module) if self.model is None else self.model
        self._searched.update((module, *root.modules()))
        return find_copies(root, [*self._optimizers, *self._taken])

    def _follow(self, root: nn.Module, called: nn.Module) -> None:
        self._find_copies(root)
        if not has_copies(root):
            disarm(self.visit)
        self._is_of_many = distributed.is_initialized()
        model = unwrapped(root)
        trace = JobTrace(sum(self.followed.includes(name) for name, _ in model.named_modules()))
        outsiders = outside(root, [*self._optimizers, *self._taken])
        before = [*local_tensors(model), *outsiders.tensors()]
        most = most_of(len(before))
        self._later = LaterSteps(called, without_errors)
        averages: Averages | None = quietly(WHAT, Averages.of, model, most)
        old = quietly(WHAT, list, averages.now()) if averages is not None else None
        weights = [*weights_of(before, most), *(old or ())]
        beside = quietly(WHAT, buffers_alone, root) or {}
        buffers = ReadBuffers(root, most, beside)
        self._step = Step(root, trace, self.options.trace_step, most, weights, outsiders, buffers, averages=averages)
        note_written = without_errors(lambda *_: buffers.note_written())
        self._handles = [each.register_forward_hook(note_written) for each in (called, *beside.values())]
        self._handles += trace.follow(model, self.followed)
        # Those before the forward: FSDP2 puts gathered ones in their place, without gradients.
        parameters, kept = list(registry.named_parameters(model)), self._step.kept
        trace.before_backward = lambda: kept.extend(with_gradients(parameters))
        if self._lines is not None:
            self._step = replace(self._step, lines=self._lines)
            self._lines.follow(root)
        copied = [ddp for ddp in root.modules() if isinstance(ddp, DistributedDataParallel)]
        if not any(contains(called, ddp) for ddp in copied):
            trace.uncalled = set(copied)
            forget = without_errors(lambda module, *_: trace.uncalled.clear())
            self._handles += [ddp.register_forward_pre_hook(forget) for ddp in copied]

    def _let_go(self, step: Step) -> None:
        """Leave a model for the one that it is a copy of: a teacher in bfloat16, called before its float32 student."""
        forget_copies(step.root)
        for handle in self._handles:
            handle.remove()
        self._step = self._later = None
        if self._lines is not None:
            self._lines.end()
            self._lines = JobLines(self.followed.lines or "", report)

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
            seen = library_step.options if library_step else None
            self._later.stepping(optimizer, lambda root: self._options_of(optimizer, root) if seen is None else seen)
        elif (
            self._step is not None
            and (self._step.trace.order or self._step.is_compiled)
            and steps(optimizer, self._step.root)
        ):
            options = (
                library_step.options
                if library_step
                else quietly(WHAT, self._options_of, optimizer, self._step.root, states_of)
            )
            gradients = (
                list(library_step.gradients.values())
                if library_step
                else quietly(WHAT, gradients_with_copies, self._step, self._outermost(optimizer))
            )
            apart = list(apart_from(self._step.root, [*self._optimizers, *self._taken]))
            optimizers = () if library_step else self._outermost(optimizer)  # a library's have stepped by now
            self._step = replace(
                self._step, options=options or {}, apart=apart, gradients=gradients, optimizers=optimizers
            )
            self._step.unknown.update(library_step.unknown if library_step else {})
            self._finish("")

    def _options_of(
        self, stepping: Optimizer, root: nn.Module, *others: Callable[[Optimizer, nn.Module], Settings]
    ) -> Settings:
        """Return the numbers with which optimizers step a model's parameters, and what other functions say of them."""
        options: Settings = {}
        for optimizer in self._outermost(stepping):
            more = [function(optimizer, unwrapped(root)) for function in others]
            for name, values in options_of(optimizer, unwrapped(root)).items():
                options[name] = options.get(name, {}) | values  # torchtitan's container of optimizers has none itself
                for of_names in more:
                    options[name] |= of_names.get(name, {})
        return options

    def _outermost(self, stepping: Optimizer) -> list[Optimizer]:
        """Return the optimizers that no other one has inside of it, last the one that steps or has that inside.

        Of a parameter that several have, as one from before a resume that is still in memory, the last one's counts.
        """
        optimizers = dict.fromkeys([*self._optimizers, *self._taken])
        inner = {id(getattr(optimizer, "optim", None)) for optimizer in optimizers}
        outermost = [optimizer for optimizer in optimizers if id(optimizer) not in inner]
        return sorted(outermost, key=lambda optimizer: stepping in (optimizer, getattr(optimizer, "optim", None)))

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
        disarm(self.visit)
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


@dataclass
class LibraryStep:
    """A library's step while it is made.

    DeepSpeed and Megatron-core reduce, unscale and clip gradients in a step of their own, let an inner optimizer step
    parts of flat buffers, one buffer at a time, and write the weights afterwards. What a parameter has in `.grad`
    before is not what its optimizer gets. Hooks on gradients may step each parameter in backward by an optimizer of its
    own, and free the gradient: all of a backward pass are one step.

    Attributes:
        stepper: The library's engine or optimizer whose step it is; None if hooks step parameters in backward.
        optimizers: The optimizers that have stepped in it, in order.
        gradients: Copies of this rank's part of the gradients that they stepped with.
        options: The numbers with which they step the model's parameters.
        unknown: Why a parameter's gradient is not understood, by name.
    """

    stepper: object
    optimizers: list[Optimizer] = field(default_factory=list)
    gradients: dict[str, Local] = field(default_factory=dict)
    options: Settings = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def add(self, optimizer: Optimizer, step: Step | None) -> None:
        """Add an inner optimizer's step, before it is made."""
        self.optimizers.append(optimizer)
        if step is None or not steps(optimizer, step.root):
            return
        model = unwrapped(step.root)
        weights = locals_of(model)
        stepped = stepped_by(optimizer)
        if self.stepper is None:
            # The gradients of others may not be there yet, or be those of an earlier micro-batch.
            others = {local.name for param, local in weights.items() if id(param) not in stepped}
            self.gradients |= {local.name: local for local in gradients_of(step, others)}
            return
        for local in registry.gradients(weights, self.stepper, stepped):
            if local.unknown:
                self.unknown[local.name] = local.unknown
            else:
                self.gradients[local.name] = replace(local, values=sampled(local.values.detach(), step.most))
        for local in gradients_of(step, names_of_stand_ins(model)):
            self.gradients.setdefault(local.name, local)
