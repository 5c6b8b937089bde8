"""Storages, versions and inner tensors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardviz.live.compat.meshes import local_of
from shardviz.live.compat.modules import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from weakref import ref


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its own elements, unlike sparse tensors and wrapper subclasses.

    A wrapper's storage is there, but has no data pointer. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return hasattr(tensor, "trigger_wait")  # a functional collective's result becomes plain once it is waited for
    return True


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others in a transform of `torch.func`, such as `vmap`: it can't be read.

    By `torch._C._functorch`, tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def in_backward() -> bool:
    """Whether this thread is running a backward pass.

    Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def is_captured() -> bool:
    """Whether a CUDA graph is being captured, which may not wait for numbers to be copied to the CPU."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward pass that this thread runs is done; a reentrant checkpoint has one of its own.

    By the engine's `queue_callback`, as FSDP2 does, tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def real_tensors() -> Any:
    """Return a context with real new tensors, even in `fake_mode`. Tried on 2.6.0, 2.13.0 and 2.15.0."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in a row, which are equal even where it has NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def id_without_memory(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage on the meta device: `_cdata`, in torch 2.6.0 to 2.15.0."""
    return -int(storage._cdata)


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors inside a wrapper such as a quantized tensor, by name; empty if plain.

    By `__tensor_flatten__`, in torch 2.6.0 to 2.15.0.
    """
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        inner_tensor = getattr(tensor, name)
        inside = inner_tensors(inner_tensor)
        tensors |= {f"{name}.{inner}": value for inner, value in inside.items()} or {name: inner_tensor}
    return tensors


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors inside a tensor: a DTensor's part, or the tensor itself.

    Wrappers say what they hold by `__tensor_flatten__`, in torch 2.6.0 to 2.15.0.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for inner_tensor in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if torch.is_tensor(inner_tensor):  # a DTensor's mesh is a part of it too
                yield from plain_tensors(inner_tensor)
    else:
        yield tensor


@contextmanager
def storages_resized(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call back with every storage that got another size, which no operator shows.

    `torch.UntypedStorage.resize_` is replaced meanwhile, as torch's own `MemTracker` does: tried on torch 2.6.0, 2.13.0
    and 2.15.0.
    """
    before = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        returned = before(storage, size)
        note(storage)
        return returned

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield


def tensor_behind(reference: ref[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that a weak reference leads to; None if it is gone.

    A tensor that only C++ holds is Python's again while someone looks at it, which torch has to be told:
    `Tensor._fix_weakref`, in torch 2.6.0 to 2.15.0. In 2.6.0 it is freed otherwise, with a warning.
    """
    tensor = reference()
    if tensor is not None:
        tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensor


def version_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often a tensor and its local part were written in place, as torch counts.

    Writes to a DTensor count on itself, those to its part on that: `Tensor._version` in torch 2.6.0 to 2.15.0.
    """
    return tensor._version, local_of(tensor)._version
