"""The hooks of a trace in somebody's job: none of them may raise there, or be compiled into what runs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.arrays.sample import kept, strides_for
from shardviz.live.compat import asks_for_shapes, in_backward
from shardviz.live.run.hooks.observing import quietly
from shardviz.live.step.running import tensors_in
from shardviz.live.step.trace.recorded import MAX_ELEMENTS, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.live.step.trace.recorded import Seen

SIDES = 4
"""Inputs, outputs and the gradients of both; many are the same tensors."""

FEWEST, MOST = 1 << 10, 1 << 18
"""Of a tensor at least and at most so many elements are kept, as many as leaves room for every module."""

MAX_GIVEN = 64
"""Of whole numbers that the model is given, such as tokens, so many tensors are kept."""


WHAT = "the trace of a step"


class JobTrace(Trace):
    """The trace of one step of a job."""

    def __init__(self, num_modules: int) -> None:
        super().__init__()
        self.most = most_of(num_modules * SIDES)
        self.copied = self._sampled
        self._states: defaultdict[str, list[list[torch.Tensor]]] = defaultdict(list)

    def _sampled(self, tensor: torch.Tensor) -> torch.Tensor:
        return sampled(tensor, self.most)

    def _begin(self, name: str) -> Callable[..., None]:
        begin = super()._begin(name)

        def begin_all(module: Any, inputs: Any, named: Any) -> None:
            if asks_for_shapes(inputs):
                return  # a pipeline's stage, run on values without a meaning
            begin(module, inputs, named)
            if not in_backward():
                self._states[name].append(_random_states())
            if not name:
                self._keep_given((inputs, named))

        return _harmless(begin_all)

    def _end(self, name: str) -> Callable[..., None]:
        end = super()._end(name)

        def end_all(module: Any, inputs: Any, output: Any) -> None:
            end(module, inputs, output)
            if self._states[name] and not in_backward():
                self.draws[name].append(not _are_equal(self._states[name].pop(), _random_states()))

        return _harmless(end_all)

    def came_back(self, seen: Seen, gradient: torch.Tensor) -> None:
        """Keep the gradient of a tensor."""
        quietly(WHAT, super().came_back, seen, gradient)

    def _keep_given(self, inputs: Any) -> None:
        whole = [one for one in tensors_in(inputs) if not one.is_floating_point() and not one.is_complex() and one.ndim]
        if len(self.given) < MAX_GIVEN:
            self.given.append([(tuple(one.shape), self._sampled(one.detach())) for one in whole])


def _harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that never raises, and that `torch.compile` leaves out of what it compiles."""

    def call(*given: Any) -> None:
        if not torch.compiler.is_compiling():
            quietly(WHAT, hook, *given)

    return call


def _random_states() -> list[torch.Tensor]:
    """Return copies of the states of the generators that modules draw from; reading one changes nothing."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _are_equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


def most_of(num_tensors: int) -> int:
    """Return how many elements of each of so many tensors are kept: a power of 2, so that all together are bounded."""
    room = MAX_ELEMENTS // max(num_tensors, 1)
    return min(max(1 << max(room.bit_length() - 1, 0), FEWEST), MOST)


def sampled(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a copy of a tensor, or of a sample of a larger one."""
    strides = strides_for(tensor.shape, most)
    parts = tuple(
        slice(kept(size, stride).start, None, stride) for size, stride in zip(tensor.shape, strides, strict=True)
    )
    return tensor[parts].clone() if parts else tensor.clone()
