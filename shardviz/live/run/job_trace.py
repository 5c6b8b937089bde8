"""The trace of one step of a running job: its hooks only read.

None of them may raise in somebody's job, or be compiled into what runs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardviz.live.compat.pipelines import asks_for_shapes
from shardviz.live.compat.tensors import in_backward
from shardviz.live.run.hooks.observing import quietly
from shardviz.live.run.step_files import WHAT, most_of, sampled
from shardviz.live.step.module_recorder import Seen, Source, Trace
from shardviz.live.step.running import tensors_in
from shardviz.live.world.group import random_states

if TYPE_CHECKING:
    from collections.abc import Callable

SIDES = 4
"""Inputs, outputs and the gradients of both; many are the same tensors."""

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

        return without_errors(begin_all)

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

        return without_errors(end_all)

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


def without_errors(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that never raises, and that `torch.compile` leaves out of what it compiles."""

    def call(*given: Any) -> None:
        if not torch.compiler.is_compiling():
            quietly(WHAT, hook, *given)

    return call
