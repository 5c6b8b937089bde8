"""Modules: their names in wrappers, what torch keeps of them, who follows their calls."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.tensor.debug import CommDebugMode


def computed_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of buffers that every rank computes and no checkpoint has.

    `_non_persistent_buffers_set` in torch 2.6.0 to 2.15.0.
    """
    return frozenset(
        name_in(prefix, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )


def is_making_states() -> bool:
    """Whether torch makes an optimizer step with zeros, so that it has states to save or to load into.

    `_init_optim_state`, which `get_state_dict` and `set_state_dict` call, in torch 2.6.0 to 2.15.0.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    makes_states = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frames = walk_stack(sys._getframe()) if makes_states is not None else ()
    return any(frame.f_code is makes_states for frame, _ in frames)


def load_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield what a module runs on a state dict before it loads it, except for torch's own hooks.

    `_load_state_dict_pre_hooks` in torch 2.6.0 to 2.15.0: its values are wrappers that pass the module on.
    """
    for wrapped in module._load_state_dict_pre_hooks.values():
        hook = getattr(wrapped, "hook", wrapped)
        if not (getattr(hook, "__module__", None) or "torch.").startswith(("torch.", "functools")):
            yield wrapped


@contextmanager
def replaced(owner: Any, name: str, new: object) -> Iterator[None]:
    """Replace an attribute of a module or a class while the context lasts.

    Afterwards a class has what it had, not what it returns when it is asked for that: a function of C++ or a static
    method would no longer be one.

    Raises:
        AttributeError: It has no such attribute.
    """
    getattr(owner, name)
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def followed(
    owner: Any, name: str, note: Callable[..., object] = lambda *_, **__: None
) -> Iterator[Callable[[], bool]]:
    """Call `note` before each call of a function, and yield a function that says whether that one is running.

    If the owner has no such function, nothing is called, and the answer is always no.
    """
    before: Any = getattr(owner, name, None)
    depth = 0

    def following(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        note(*args, **kwargs)
        depth += 1
        try:
            return before(*args, **kwargs)
        finally:
            depth -= 1

    with nullcontext() if before is None else replaced(owner, name, following):
        yield lambda: depth > 0


def innermost_modes() -> tuple[Any, Any]:
    """Return the innermost mode that sees torch's functions, and the one that sees its operators.

    A mode for the default device is none: it stands behind all others wherever it is entered.
    `_get_current_function_mode` and `_get_current_dispatch_mode` in torch 2.6.0 to 2.15.0.
    """
    mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return (None if isinstance(mode, DeviceContext) else mode), _get_current_dispatch_mode()


set_frame_compiler: Any = torch._C._dynamo.eval_frame.set_eval_frame
"""Say what compiles frames that start from now on, None for nothing, and return what did. It has no frame itself.

`set_eval_frame`, in torch 2.6.0 to 2.15.0.
"""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module came from `torch.compile` or was compiled by `Module.compile`.

    `OptimizedModule` and `_compiled_call_impl` in torch 2.6.0 to 2.15.0.
    """
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def class_name(module: nn.Module) -> str:
    """Return a module's class name, without `torch.compile`'s wrapper. `_orig_mod` in 2.6.0 to 2.15.0."""
    return type(getattr(module, "_orig_mod", module)).__name__


@contextmanager
def compiled_calls_wrapped(
    module: nn.Module, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wrap what a compiled module runs, because `Module.compile` compiles hooks too.

    Tried on torch 2.6.0, 2.13.0 and 2.15.0.

    Args:
        module: What `is_compiled` says is compiled.
        wrapped: Returns what runs instead of a function.
    """
    name = "forward" if type(module).__name__ == "OptimizedModule" else "_compiled_call_impl"
    with replaced(module, name, wrapped(getattr(module, name))):
        yield


def follow_modules_by(mode: CommDebugMode, tracker: Any) -> None:
    """Give a `CommDebugMode` a different tracker of the running module.

    The attribute exists in torch 2.6.0, 2.13.0 and 2.15.0.
    """
    mode.advanced_module_tracker = tracker


def unit_of(name: str) -> str | None:
    """Return the module whose flat parameter has this name; else None.

    FSDP1 names it `_flat_param`: tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    path, _, last = name.rpartition(".")
    return clean_name(path) if last == "_flat_param" else None


WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def name_in(prefix: str, name: str) -> str:
    """Return a tensor's name in a model, given its name in a module of it."""
    return clean_name(f"{prefix}.{name}" if prefix else name)


def clean_name(name: str) -> str:
    """Drop what wrappers add to a name: FSDP1, torch.compile and activation checkpointing.

    DistributedDataParallel's `module` is a public name and stays.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
