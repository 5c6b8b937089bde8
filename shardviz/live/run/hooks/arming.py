"""Sees modules' calls: replaces `Module.__call__` until a sharded model is first called."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardviz.live.compat.modules import set_frame_compiler
from shardviz.live.run.hooks.observing import quietly

if TYPE_CHECKING:
    from collections.abc import Callable

_VISITS: dict[Any, None] = {}
os.register_at_fork(after_in_child=_VISITS.clear)
_ORIGINAL: list[Any] = []
_OURS: list[Any] = []


def arm(visit: Callable[[nn.Module], None]) -> None:
    """Call a function with every module that is called from now on, before it runs."""
    _VISITS[visit] = None
    if not _ORIGINAL:
        _ORIGINAL.append(nn.Module.__call__)
        _OURS.append(_with_visit(nn.Module.__call__))
        nn.Module.__call__ = _OURS[0]  # type: ignore[method-assign]


def disarm(visit: Callable[[nn.Module], None]) -> None:
    """Stop calling the hook; wrappers that others put around it meanwhile stay."""
    _VISITS.pop(visit, None)
    if not _VISITS and _OURS and nn.Module.__call__ is _OURS[0]:
        nn.Module.__call__ = _ORIGINAL.pop()  # type: ignore[method-assign]
        _OURS.clear()


def _with_visit(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if _VISITS and not torch.compiler.is_compiling():
            compiler = set_frame_compiler(None)  # a compiled model's first call compiles all frames, these too
            try:
                for visit in list(_VISITS):
                    quietly("Module.__call__", visit, self)
            finally:
                set_frame_compiler(compiler)
        return original(self, *args, **kwargs)

    return __call__
