"""What a forward keeps for its backward: the storages that are still there when it has ended, by the module that ran.

Every storage that an operator makes is followed by a weak reference, so that whatever keeps it counts: autograd, the
inputs of a checkpoint, a list of the model's own. Weights that are gathered do not count, nor what was there before.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.live.compat import clean_name, id_without_memory, in_backward, local_of
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


class Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages while a model runs.

    Args:
        model: The model.
        passes: The modules whose forwards are what is waited for: the stages of a pipeline, or the model itself.

    Attributes:
        most: Bytes by module at the end of the forward after which there were most.
    """

    def __init__(self, model: nn.Module, passes: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._passes = tuple(passes)
        self._storages: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._running: list[str] = []
        self._handles: list[Any] = []
        self.most: Counter[str] = Counter()

    def __enter__(self) -> Kept:
        for name, module in self._model.named_modules():
            self._follow(module, clean_name(name))
        for one in self._passes:
            self._handles.append(one.register_forward_hook(lambda *_: self._look()))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _follow(self, module: nn.Module, name: str) -> None:
        def enter(*_: Any) -> None:
            self._running.append(name)

        def leave(*_: Any) -> None:
            self._running.pop()

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and follow the storages that it made."""
        returned = func(*args, **(kwargs or {}))
        if not in_backward():
            for tensor in tensors_in(returned):
                self._note(local_of(tensor))
        return returned

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id_without_memory(storage)
        if key not in self._storages or self._storages[key][0]() is None:
            name = self._running[-1] if self._running else ""
            self._storages[key] = weakref.ref(storage), name

    def _look(self) -> None:
        weights = {
            id_without_memory(local_of(one).untyped_storage())
            for one in (*self._model.parameters(), *self._model.buffers())
        }
        now: Counter[str] = Counter()
        for key, (reference, name) in self._storages.items():
            storage = reference()
            if storage is not None and key not in weights:
                now[name] += storage.nbytes()
        if now.total() > self.most.total():
            self.most = now
