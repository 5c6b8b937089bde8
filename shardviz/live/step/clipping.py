"""Clipping in a probe's step, by torch.nn.utils: the unsharded model's gradients are then clipped by the same calls.

Only if every rank made the same calls, of parameters that the unsharded model has, after the last backward: else the
gradients are compared as they are, and clipping that is recognized there is not checked.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.locals import unwrapped
from shardviz.live.compat.meshes import norms_reduced_first
from shardviz.live.compat.modules import clean_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from torch import nn

FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")


@dataclass(frozen=True, slots=True)
class Clip:
    """A call that clips gradients.

    Attributes:
        function: Its name in torch.nn.utils.
        names: The parameters, by name.
        args: What it was given besides them.
        kwargs: The same, by keyword.
    """

    function: str
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def apply(self, model: nn.Module) -> None:
        """Clip another model's gradients in the same way."""
        named = dict(model.named_parameters(remove_duplicate=False))
        clip = getattr(torch.nn.utils, self.function)
        clip([named[name] for name in self.names], *self.args, **dict(self.kwargs))


@dataclass
class Clips:
    """The calls that clip a model's gradients while a step runs.

    Attributes:
        model: The model.
        calls: The calls, in order.
        is_last: Whether nothing wrote to what was clipped before it was clipped again.
    """

    model: nn.Module
    calls: list[Clip] = field(default_factory=list)
    is_last: bool = True
    _left: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def note(self, function: str, params: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call that is about to be made."""
        self.is_last &= self._are_left(params)
        names = {id(param): clean_name(name) for name, param in unwrapped(self.model).named_parameters()}
        self.calls.append(
            Clip(function, tuple(names.get(id(one), "") for one in params), args, tuple(sorted(kwargs.items())))
        )

    def keep(self, params: list[torch.Tensor]) -> None:
        """Keep what a call left, by which it is seen whether it was the last to write it."""
        self._left |= {one: _local(one.grad).clone() for one in params if one.grad is not None}

    def of_step(self) -> tuple[Clip, ...]:
        """Return the calls, if all of them came after backward; none else."""
        return tuple(self.calls) if self.is_last and self._are_left(list(self._left)) else ()

    def _are_left(self, params: list[torch.Tensor]) -> bool:
        kept = ((self._left[one], one.grad) for one in params if one in self._left)
        return all(grad is not None and torch.equal(left, _local(grad)) for left, grad in kept)


@contextmanager
def noted_clips(model: nn.Module, probe: ModuleType) -> Iterator[Clips]:
    """Note calls of torch's clipping inside this context, also by the name that a probe has imported it under."""
    clips = Clips(model)
    places = [vars(torch.nn.utils), vars(probe)]
    originals = {name: getattr(torch.nn.utils, name) for name in FUNCTIONS}
    replaced = [(at, key, name) for name in FUNCTIONS for at in places for key in at if at[key] is originals[name]]
    try:
        for at, key, name in replaced:
            at[key] = _noting(clips, name, originals[name])
        with norms_reduced_first():
            yield clips
    finally:
        for at, key, name in replaced:
            at[key] = originals[name]


def _noting(clips: Clips, name: str, original: Any) -> Any:
    @wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if torch.is_tensor(parameters) else list(parameters)
        clips.note(name, params, args, kwargs)
        returned = original(params, *args, **kwargs)
        clips.keep(params)
        return returned

    return clip


def agreed_clips(clips: tuple[Clip, ...], model: nn.Module) -> tuple[Clip, ...]:
    """Return a sharded step's calls if all ranks made them and the model has the parameters. Every rank calls this."""
    of_all = of_all_ranks(repr(clips))
    param_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    is_known = all(set(clip.names) <= param_names for clip in clips)
    return clips if len(set(of_all)) == 1 and is_known else ()


def _local(grad: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.detach()
