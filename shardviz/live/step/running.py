"""Tracks the module of a model that is running, forward or backward, with hooks that do not affect autograd.

`CommDebugMode`'s own tracker wraps the outputs of modules and hooks the gradients of their inputs. Under it, in-place
operations on a module's output and `torch.autograd.grad` raise, even in models that run without it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardviz.live.compat.modules import clean_name
from shardviz.live.compat.tensors import in_backward, tensor_behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


class Running:
    """Follows a model's modules, in the place of `CommDebugMode`'s tracker.

    Args:
        model: The model; without it nothing is followed.

    Attributes:
        name: The module that is running; empty for the model itself, or if none is running.
    """

    activation_checkpointing = False

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._names: dict[nn.Module, str] = {}
        self._forward: list[str] = []
        self._backward = ""
        self._innermost = ""
        self._gradient: weakref.ref[torch.Tensor] | None = None  # kept alive, it would count as memory of the step
        self.module_parents_dict: defaultdict[str, set[str]] = defaultdict(set)

    @property
    def name(self) -> str:
        """The module that is running; empty for the model itself, or if none is running."""
        if self._forward:
            return self._forward[-1]
        return self._backward if self.is_bw else ""

    @property
    def is_bw(self) -> bool:
        """Whether a backward pass is running."""
        return in_backward()

    @property
    def is_outside(self) -> bool:
        """Whether no module is running, forward or backward."""
        return not self._forward and not self.is_bw

    def __enter__(self) -> None:
        for name, module in self._model.named_modules() if self._model is not None else ():
            self._names[module] = clean_name(name)
            self._handles += self._follow(module, clean_name(name))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._gradient = None
        self._names.clear()

    def name_of(self, module: nn.Module | None) -> str:
        """Return a module's name; that of the running one if it isn't the model's, or not given."""
        return self.name if module is None else self._names.get(module, self.name)

    def _follow(self, module: nn.Module, name: str) -> Iterator[Any]:
        def enter(*_: Any) -> None:
            self._forward.append(name)

        def returned(_module: Any, _inputs: Any, output: Any) -> None:
            on_gradient(output, prepare_backward)

        def leave(_module: Any, _inputs: Any, output: Any) -> None:
            self._forward.pop()
            on_gradient(output, begin_backward)

        def on_gradient(output: Any, hook: Callable[[torch.Tensor | None], None]) -> None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

        def prepare_backward(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # a Function sent nothing back
                return
            if self._gradient is None or tensor_behind(self._gradient) is not gradient:
                self._gradient, self._innermost = weakref.ref(gradient), name
            self._backward = name

        def begin_backward(_gradient: torch.Tensor | None) -> None:
            self._backward = self._innermost

        # FSDP's hook before a module's backward is on the output too, and runs between these two. A module and its last
        # child may return the same tensor: then the child, whose hooks come first, is the one whose backward begins.
        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(returned, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's input or output, also inside containers."""
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, dict | list | tuple):
        for element in output.values() if isinstance(output, dict) else output:
            yield from tensors_in(element)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name, None))
