"""Waits for the step that is to be followed: from a model's first call in it to its optimizer's step."""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.followed import Followed
from shardviz.live.run.hooks.arming import arm, disarm
from shardviz.live.run.hooks.observing import nested, quietly
from shardviz.live.run.known.values import outermost
from shardviz.live.run.tracing.writing import JobTrace, Step, most_of, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

    from shardviz.live.run.options import Options


class Follower:
    """Follows one step of a model.

    Attributes:
        options: What is asked for.
        write: Writes what was seen of the step; given also why the step has no end, where it has none.
        model: The model; by default the first that an optimizer steps whose making is seen.
    """

    def __init__(self, options: Options, write: Callable[[Step, str], None], model: nn.Module | None = None) -> None:
        self.options = options
        self.write = write
        self.model = model
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._handles: list[Any] = []
        self._step: Step | None = None
        self._is_over = False
        self._process = os.getpid()

    def optimizing(self, optimizer: Optimizer) -> None:
        """Look at the steps of an optimizer, and at the calls of modules until the step begins."""
        if self._is_over or os.getpid() != self._process:
            return
        if not self._optimizers:
            self.begin()
        self._optimizers.add(optimizer)

    def begin(self) -> None:
        """Wait for the step."""
        self._watch_steps()
        arm(self.visit)

    def _watch_steps(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        # The hooks stay: torch walks over them while it calls them, and raises if one is removed meanwhile.
        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            quietly("the trace of a step", self._before, optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._taken[optimizer] = self._taken.get(optimizer, 0) + 1

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
        atexit.register(quietly, "the trace of a step", self._end_with_process)

    def visit(self, module: nn.Module) -> None:
        """Begin if the module that is called is the model that is trained, or a part of it, and its step has come."""
        if self._step is not None or self._is_over or os.getpid() != self._process:
            return
        with nested() as is_outermost:
            if is_outermost and torch.is_grad_enabled() and self._is_trained(module):
                self._follow(outermost(module) if self.model is None else self.model)

    def _is_trained(self, module: nn.Module) -> bool:
        wanted = {id(one) for one in module.parameters() if one.requires_grad}
        known = [*self._optimizers, *self._taken]
        own = [optimizer for optimizer in known if wanted & _parameters(optimizer)]
        is_due = max((self._taken.get(one, 0) for one in own), default=0) == self.options.trace_step - 1
        is_model = bool(own) if self.model is None else runs(module, self.model)
        return is_model and is_due and not any(one.is_meta for one in module.parameters())

    def _follow(self, root: nn.Module) -> None:
        disarm(self.visit)
        model = unwrapped(root)
        followed = Followed.parse(self.options.trace)
        trace = JobTrace(sum(followed.includes(name) for name, _ in model.named_modules()))
        before = list(local_tensors(model))
        most = most_of(len(before))
        self._step = Step(root, trace, self.options.trace_step, most, weights_of(before, most))
        self._handles = list(trace.follow(model, followed))

    def _before(self, optimizer: Optimizer) -> None:
        """End the step if this optimizer steps the model, and something of the model was called."""
        if self._step is not None and self._step.trace.order:
            wanted = {id(one) for one in self._step.root.parameters()}
            if wanted & _parameters(optimizer):
                self._finish("")

    def _end_with_process(self) -> None:
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
        with nested(), torch.no_grad():
            self.write(replace(step, broke_off=broke_off), problem)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def _contains(modules: Iterable[nn.Module], wanted: nn.Module) -> bool:
    return any(one is wanted for one in modules)


def runs(module: nn.Module, model: nn.Module) -> bool:
    """Whether a call of a module is one of a model: of itself, of a wrapper or of a part."""
    return _contains(module.modules(), model) or _contains(model.modules(), module)
