"""Buffers that a model's own forward reads and does not write: a bias that balances experts, a codebook, a scale.

Statistics that a forward writes, as those of BatchNorm, are of a rank's own rows, and evaluation alone reads them. What
is written between steps and read in training makes another model of each rank if it differs. No program can be asked
what it reads: a forward reads the buffers that its code, or that of methods which it names, names.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING

import torch

from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.compat import clean_name
from shardviz.live.randomness import random_states
from shardviz.live.run.step_files import sampled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from shardviz.live.capture.locals import Local


class ReadBuffers:
    """The buffers of a model that a step reads.

    Attributes:
        before: Copies of them from before the step.
    """

    def __init__(self, root: nn.Module, most: int) -> None:
        """Copy them, of large ones a sample of that many elements."""
        self._model, self._most = unwrapped(root), most
        named = {name for module in self._model.modules() for name in _named_by(type(module))}
        self._states = {name: state for name, state in self._current() if name.rpartition(".")[-1] in named}
        self.before = list(self._copies())
        self._random = random_states()

    def leave_out_written(self) -> None:
        """Leave out those that were written, or replaced, since they were copied."""
        current = dict(self._current())
        self._states = {name: state for name, state in self._states.items() if current.get(name) == state}
        self.before = [local for local in self.before if local.name in self._states]
        self._random = random_states()

    def after(self) -> list[Local]:
        """Return copies of them as they are now; none if random numbers were drawn since, which some may be."""
        is_drawn = not all(map(torch.equal, self._random, random_states()))
        return [] if is_drawn else list(self._copies())

    def _current(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, buffer in self._model.named_buffers():
            if type(buffer) is torch.Tensor and buffer.is_floating_point() and not buffer.is_meta:
                yield clean_name(name), (id(buffer), buffer._version)

    def _copies(self) -> Iterator[Local]:
        for local in local_tensors(self._model) if self._states else ():
            if local.role == "buffer" and local.name in self._states:
                yield replace(local, values=sampled(local.values, self._most))


def _named_by(kind: type[nn.Module]) -> set[str]:
    """Return the attributes that a class's forward names, and the methods that it names; none of torch's own classes.

    The class that `fully_shard` derives has no forward of its own.
    """
    names: set[str] = set()
    waiting = ["forward"]
    while waiting:
        method = inspect.unwrap(getattr(kind, waiting.pop()))
        if not isinstance(method, FunctionType) or method.__module__.startswith("torch."):
            continue
        new = {*method.__code__.co_names} - names
        names |= new
        waiting += [name for name in new if isinstance(getattr(kind, name, None), FunctionType)]
    return names
