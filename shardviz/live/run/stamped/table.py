"""What is changed of torch and of libraries under `--stamp`: what loads opens copies, what saves ends the job.

Unlike hooks that only look, these must not fail in silence: where a copy cannot be made, or a save would go on, the
process ends.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.live.run.hooks.wrapping import argument, observer

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.live.run.hooks.wrapping import Call
    from shardviz.live.run.observer import Observer


@dataclass(frozen=True, slots=True)
class Redirect:
    """A function that opens a checkpoint: it gets the copy's path.

    Attributes:
        name: Its name in its module.
        index: Where the path is among its arguments.
        called: What the argument is called.
        is_optional: Whether the module may lack it.
    """

    name: str
    index: int
    called: str
    is_optional: bool = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with another path."""

        @_like(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = list(args)
            if len(given) > self.index:
                given[self.index] = _redirected(given[self.index])
            elif self.called in kwargs:
                kwargs = {**kwargs, self.called: _redirected(kwargs[self.called])}
            return function(*given, **kwargs)

        return call


@dataclass(frozen=True, slots=True)
class Replace:
    """A function that returns what was loaded: its weights are stamped.

    Attributes:
        name: Its name in its module.
        is_optional: Whether the module may lack it.
    """

    name: str
    is_optional: bool = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with another result."""

        @_like(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            place = argument((args, kwargs), 0, "f")
            if _is_of_a_file(place):
                _or_end(observer(), lambda seen: seen.stamping(result, getattr(place, "name", place)))
            return result

        return call


@dataclass(frozen=True, slots=True)
class Before:
    """A function before which something is done, which ends the job if that fails.

    Attributes:
        name: Its name in its module.
        what: Called with the observer and the call.
        is_optional: Whether the module may lack it.
        is_after: Whether it is done after the function instead.
    """

    name: str
    what: Callable[[Observer, Call], None]
    is_optional: bool = False
    is_after: bool = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with something before it, or after it."""

        @_like(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_after:
                result = function(*args, **kwargs)
                _or_end(observer(), lambda seen: self.what(seen, (args, kwargs)))
                return result
            _or_end(observer(), lambda seen: self.what(seen, (args, kwargs)))
            return function(*args, **kwargs)

        return call


def _like(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    own = () if isinstance(function, type) else functools.WRAPPER_UPDATES
    return functools.wraps(function, updated=own)


def _or_end(seen: Observer, do: Callable[[Observer], Any]) -> Any:
    """Do something, or end the process: what it loads or saves then is not what it should be."""
    from shardviz.live.run.ending import end_at_once

    try:
        return do(seen)
    except Exception as error:
        end_at_once(seen.session, error)


def _redirected(place: Any) -> Any:
    return _or_end(observer(), lambda seen: seen.redirected(place))


def _is_of_a_file(place: Any) -> bool:
    """Whether torch.load or torch.save was given a file; streams in memory are how torch sends tensors."""
    return isinstance(place, str | os.PathLike) or isinstance(getattr(place, "name", None), str)


def _saves(what: str, index: int = 0, called: str = "") -> Callable[[Observer, Call], None]:
    def end(seen: Observer, call: Call) -> None:
        target = argument(call, index, called) if called else None
        seen.saving(what if target is None else f"{what} to {target}")

    return end


def _torch_saves(seen: Observer, call: Call) -> None:
    target = argument(call, 1, "f")
    if _is_of_a_file(target) and has_tensors(argument(call, 0, "obj")):
        seen.saving(f"torch.save to {getattr(target, 'name', target)}")


def has_tensors(value: Any) -> bool:
    """Whether a value that is saved has tensors in it, as far as that is seen from outside."""
    import torch

    if isinstance(value, dict):
        return any(map(has_tensors, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(has_tensors, value))
    return isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer) or hasattr(value, "state_dict")


def _gives_memory(seen: Observer, call: Call) -> None:
    from shardviz.live.run.stamped.poison import poison_module

    poison_module(call[0][0])


def _loads(index: int, called: str) -> Callable[[Observer, Call], None]:
    def poison(seen: Observer, call: Call) -> None:
        from shardviz.live.run.stamped.poison import poison_loaded

        module, state = argument(call, 0, "model"), argument(call, index, called)
        if isinstance(state, dict):
            poison_loaded(module, state)

    return poison


def _loads_dcp(seen: Observer, call: Call) -> None:
    from shardviz.live.run.stamped.poison import poison_state
    from shardviz.reference.files import open_reference

    place = call[1].get("checkpoint_id") or getattr(call[1].get("storage_reader"), "path", None)
    state = argument(call, 0, "state_dict")
    copy = seen.redirected(place)
    if place is not None and isinstance(state, dict) and os.path.isdir(copy):
        poison_state(state, open_reference(copy).entries)


STAMPED: dict[str, tuple[Redirect | Replace | Before, ...]] = {
    "safetensors": (
        Redirect("safe_open", 0, "filename"),
        Before("serialize_file", _saves("a save of safetensors", 1, "filename")),
        Before("serialize", _saves("a save of safetensors")),
    ),
    "torch.distributed.checkpoint.filesystem": (
        Redirect("FileSystemReader.__init__", 1, "path"),
        Redirect("FileSystemReader.reset", 1, "checkpoint_id", is_optional=True),
    ),
    "torch.distributed.checkpoint.state_dict_loader": (Before("load", _loads_dcp),),
    "torch.distributed.checkpoint.state_dict_saver": (
        Before("save", _saves("torch.distributed.checkpoint.save")),
        Before("async_save", _saves("torch.distributed.checkpoint.async_save"), is_optional=True),
        Before("save_state_dict", _saves("torch.distributed.checkpoint.save_state_dict"), is_optional=True),
    ),
    "torch.distributed.checkpoint.state_dict": (Before("set_model_state_dict", _loads(1, "model_state_dict")),),
    "torch.serialization": (Replace("load"), Before("save", _torch_saves)),
    "torch.nn.modules.module": (
        Before("Module.load_state_dict", _loads(1, "state_dict")),
        Before("Module.to_empty", _gives_memory, is_after=True),
    ),
    "transformers.modeling_utils": (Before("PreTrainedModel.save_pretrained", _saves("save_pretrained")),),
}
"""By module, as `table.HOOKS`. What `safetensors.torch` has goes through what `safetensors` has."""
