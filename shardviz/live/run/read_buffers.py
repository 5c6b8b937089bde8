"""Buffers that a model's own forward reads, or writes: a bias that balances experts, a codebook, a queue of keys.

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
from shardviz.live.run.buffer_uses import uses_of
from shardviz.live.run.step_files import sampled

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import nn

    from shardviz.live.capture.locals import Local


class ReadBuffers:
    """The buffers of a model that a step reads or writes.

    Attributes:
        written: Those that a forward wrote, each with the line that writes it; empty if that is not known.
        carried: Those of them that it reads in training before it writes them.
    """

    def __init__(self, root: nn.Module, most: int) -> None:
        """Copy them, of large ones a sample of that many elements."""
        self._model, self._most = unwrapped(root), most
        kinds = {type(module) for module in self._model.modules()}
        self._named = {name for kind in kinds for name in _named_by(kind)}
        uses = {kind: uses_of(kind) for kind in kinds}
        self._uses = {
            clean_name(f"{path}.{name}" if path else name): use
            for path, module in self._model.named_modules()
            for name, use in uses[type(module)].items()
        }
        self._states = dict(self._current())
        self._before = list(self._copies(self._states))
        self._random = random_states()
        self.written: dict[str, str] = {}
        self.carried: list[str] = []

    @property
    def before(self) -> list[Local]:
        """Copies from before the step of those that a forward wrote, or names and did not write."""
        return [local for local in self._before if local.name in self.written or self._is_read(local)]

    @property
    def is_drawn(self) -> bool:
        """Whether random numbers were drawn since the last forward."""
        return not all(map(torch.equal, self._random, random_states()))

    def note_written(self) -> None:
        """Note those that were written, or replaced, since they were copied."""
        current = dict(self._current())
        for name in (name for name, state in self._states.items() if current.get(name) != state):
            is_carried, line = self._uses.get(name, (False, ""))
            self.carried += [name] if is_carried and name not in self.written else []
            self.written[name] = line
        self._random = random_states()

    def written_after(self) -> list[Local]:
        """Return copies as they are now of those that a forward wrote."""
        return list(self._copies(self.written))

    def after(self) -> list[Local]:
        """Return copies of the others as they are now; none if random numbers were drawn since: some may be random."""
        names = [local.name for local in self._before if local.name not in self.written and self._is_read(local)]
        return [] if self.is_drawn else list(self._copies(names))

    def _is_read(self, local: Local) -> bool:
        return local.name.rpartition(".")[-1] in self._named and local.values.is_floating_point()

    def _current(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, buffer in self._model.named_buffers():
            if type(buffer) is torch.Tensor and not buffer.is_complex() and not buffer.is_meta:
                yield clean_name(name), (id(buffer), buffer._version)

    def _copies(self, names: Collection[str]) -> Iterator[Local]:
        for local in local_tensors(self._model) if names else ():
            if local.role == "buffer" and local.name in names:
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
