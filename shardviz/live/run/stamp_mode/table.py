"""Functions changed under `--stamp`: loading opens stamped copies, saving ends the job.

Unlike hooks that only look, these must not fail in silence: if a copy cannot be made, or a save would go on, the
process ends.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardviz.live.run.hooks.wrapping import Call, argument, observer

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.live.run.observer import Observer


@dataclass(frozen=True, slots=True)
class Change:
    """A function that does something else.

    Attributes:
        name: Its name in its module.
        instead: Called with the function and what it is called with.
        is_optional: Whether the module may lack it.
    """

    name: str
    instead: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    is_optional: bool = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in place of the function."""

        @functools.wraps(function, updated=() if isinstance(function, type) else functools.WRAPPER_UPDATES)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.instead(function, args, kwargs)

        return call


def _redirect(name: str, index: int, called: str, *, is_optional: bool = False) -> Change:
    """Have a function that opens a checkpoint open its copy."""

    def instead(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = list(args)
        if len(arguments) > index:
            arguments[index] = _redirect_path(arguments[index])
        elif called in kwargs:
            kwargs = {**kwargs, called: _redirect_path(kwargs[called])}
        return function(*arguments, **kwargs)

    return Change(name, instead, is_optional)


def _run_before(name: str, do: Callable[[Observer, Call], None], *, is_optional: bool = False) -> Change:
    """Do something before a function, and end the job if that fails."""

    def instead(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _do_or_end(observer(), lambda seen: do(seen, (args, kwargs)))
        return function(*args, **kwargs)

    return Change(name, instead, is_optional)


def _torch_load(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stamp the weights of what was loaded."""
    loaded = function(*args, **kwargs)
    place = argument((args, kwargs), 0, "f")
    if _is_of_a_file(place):
        _do_or_end(observer(), lambda seen: seen.stamping(loaded, getattr(place, "name", place)))
    return loaded


def _to_empty(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Poison the memory that a module was given."""
    from shardviz.live.run.stamp_mode.loads import poison_module

    returned = function(*args, **kwargs)
    _do_or_end(observer(), lambda _: poison_module(args[0]))
    return returned


def _do_or_end(process_observer: Observer, do: Callable[[Observer], Any]) -> Any:
    """Do something; end the process if it fails, before wrong values are loaded or saved."""
    from shardviz.live.run.meeting import end_at_once

    try:
        return do(process_observer)
    except Exception as error:
        end_at_once(process_observer.session, error)


def _redirect_path(place: Any) -> Any:
    return _do_or_end(observer(), lambda seen: seen.redirected(place))


def _is_of_a_file(place: Any) -> bool:
    """Whether torch.load or torch.save got a file; torch sends tensors as memory streams."""
    return isinstance(place, str | os.PathLike) or isinstance(getattr(place, "name", None), str)


def _saves(what: str, index: int = 0, called: str = "") -> Callable[[Observer, Call], None]:
    def end(seen: Observer, call: Call) -> None:
        target = argument(call, index, called) if called else None
        seen.saving(what if target is None else f"{what} to {target}")

    return end


def _torch_saves(process_observer: Observer, call: Call) -> None:
    target = argument(call, 1, "f")
    if _is_of_a_file(target) and has_tensors(argument(call, 0, "obj")):
        process_observer.saving(f"torch.save to {getattr(target, 'name', target)}")


def has_tensors(value: Any) -> bool:
    """Whether a value that is saved has tensors in it, as far as that is seen from outside."""
    import torch

    if isinstance(value, dict):
        return any(map(has_tensors, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(has_tensors, value))
    return isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer) or hasattr(value, "state_dict")


def _loads(index: int, called: str) -> Callable[[Observer, Call], None]:
    def poison(process_observer: Observer, call: Call) -> None:
        from shardviz.live.run.stamp_mode.loads import poison_loaded

        module, state = argument(call, 0, "model"), argument(call, index, called)
        if isinstance(state, dict):
            poison_loaded(module, state)

    return poison


def _loads_dcp(process_observer: Observer, call: Call) -> None:
    from shardviz.live.run.stamp_mode.loads import poison_state
    from shardviz.reference.files import open_reference

    place = call[1].get("checkpoint_id") or getattr(call[1].get("storage_reader"), "path", None)
    state = argument(call, 0, "state_dict")
    copy = process_observer.redirected(place)
    if place is not None and isinstance(state, dict) and os.path.isdir(copy):
        poison_state(state, open_reference(copy).entries)


STAMPED: dict[str, tuple[Change, ...]] = {
    "safetensors": (
        _redirect("safe_open", 0, "filename"),
        _run_before("serialize_file", _saves("a save of safetensors", 1, "filename")),
        _run_before("serialize", _saves("a save of safetensors")),
    ),
    "torch.distributed.checkpoint.filesystem": (
        _redirect("FileSystemReader.__init__", 1, "path"),
        _redirect("FileSystemReader.reset", 1, "checkpoint_id", is_optional=True),
    ),
    "torch.distributed.checkpoint.state_dict_loader": (_run_before("load", _loads_dcp),),
    "torch.distributed.checkpoint.state_dict_saver": (
        _run_before("save", _saves("torch.distributed.checkpoint.save")),
        _run_before("async_save", _saves("torch.distributed.checkpoint.async_save"), is_optional=True),
        _run_before("save_state_dict", _saves("torch.distributed.checkpoint.save_state_dict"), is_optional=True),
    ),
    "torch.distributed.checkpoint.state_dict": (_run_before("set_model_state_dict", _loads(1, "model_state_dict")),),
    "torch.serialization": (Change("load", _torch_load), _run_before("save", _torch_saves)),
    "torch.nn.modules.module": (
        _run_before("Module.load_state_dict", _loads(1, "state_dict")),
        Change("Module.to_empty", _to_empty),
    ),
    "transformers.modeling_utils": (_run_before("PreTrainedModel.save_pretrained", _saves("save_pretrained")),),
}
"""By module, as `table.HOOKS`. What `safetensors.torch` has goes through what `safetensors` has."""
