"""Which module of a model runs, forward or backward, told by hooks that leave autograd as it is.

`CommDebugMode`'s own tracker wraps what modules put out and watches gradients of what they take: under it in-place
operations on a module's output and `torch.autograd.grad` raise, in models that run without it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from shardviz.live.compat import clean_name, in_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class Running:
    """Follows a model's modules, in the place of `CommDebugMode`'s tracker.

    Args:
        model: The model; without one nothing is followed.

    Attributes:
        name: The module that runs; empty for the model itself, or where none runs.
    """

    activation_checkpointing = False

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._forward: list[str] = []
        self._backward = ""
        self.module_parents_dict: defaultdict[str, set[str]] = defaultdict(set)

    @property
    def name(self) -> str:
        """The module that runs; empty for the model itself, or where none runs."""
        if self._forward:
            return self._forward[-1]
        return self._backward if self.is_bw else ""

    @property
    def is_bw(self) -> bool:
        """Whether a backward pass runs."""
        return in_backward()

    @property
    def is_outside(self) -> bool:
        """Whether no module runs, forward or backward."""
        return not self._forward and not self.is_bw

    def __enter__(self) -> None:
        for name, module in self._model.named_modules() if self._model is not None else ():
            self._handles += self._follow(module, clean_name(name))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _follow(self, module: nn.Module, name: str) -> Iterator[Any]:
        def enter(*_: Any) -> None:
            self._forward.append(name)

        def leave(_module: Any, _inputs: Any, output: Any) -> None:
            self._forward.pop()
            meet(_module, _inputs, output)

        def meet(_module: Any, _inputs: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]

        def begin_backward(_gradient: torch.Tensor) -> None:
            self._backward = name

        # What FSDP does before a module's backward hangs on its output too: the first hook is met before that.
        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(meet, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a module takes or puts out, in containers too."""
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, dict | list | tuple):
        for item in output.values() if isinstance(output, dict) else output:
            yield from tensors_in(item)
