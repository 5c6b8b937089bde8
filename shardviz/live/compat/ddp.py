"""DistributedDataParallel: its buckets, even if no other rank is there."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from shardviz.live.compat.modules import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class _PartOfBucket:
    """One part of a DistributedDataParallel bucket, with the interface of torch's `GradBucket`, which documents it."""

    def __init__(self, buffer: torch.Tensor, params: Sequence[torch.Tensor], at: int, *, is_last: bool) -> None:
        self._buffer = buffer
        self._params = list(params)
        self._at = at
        self._is_last = is_last

    def index(self) -> int:
        return self._at

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._params

    def gradients(self) -> list[torch.Tensor]:
        cut = torch.split(self._buffer, [param.numel() for param in self._params])
        return [piece.view(param.shape) for piece, param in zip(cut, self._params, strict=True)]

    def is_last(self) -> bool:
        return self._is_last


def ddp_alone(model: nn.Module) -> list[torch.Tensor]:
    """Make DistributedDataParallel reduce by calls of `all_reduce`, in a fake world.

    A fake world's own answers crash it.

    Its first step has one bucket for all gradients; they are reduced as in the steps that follow, by the model's own
    hook if it has one. `_comm_hooks` and `_register_comm_hook`, tried on torch 2.6.0 to 2.15.0, whose `FakeWork` has a
    future without tensors.

    Returns:
        The buckets that were reduced, once they are.
    """
    buckets: list[torch.Tensor] = []

    def reduce(ddp: Any, bucket: Any) -> Any:
        buckets.append(bucket.buffer())
        later = _buckets(ddp, bucket.parameters()[::-1]) if _builds_again(ddp) else [bucket.parameters()]
        parts = torch.split(bucket.buffer(), [sum(map(torch.numel, parameters)) for parameters in later])
        hook, state = next(iter(ddp._comm_hooks), (_all_reduced, ddp.process_group))
        for at, (bucket_part, parameters) in enumerate(zip(parts, later, strict=True)):
            hook(state, _PartOfBucket(bucket_part, parameters, at, is_last=at == len(later) - 1))
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def hook(ddp: Any) -> None:
        with suppress(RuntimeError):
            torch._C._distributed_c10d._register_comm_hook(ddp.reducer, ddp, reduce)

    for ddp in _ddps(model):
        hook(ddp)
    for state in _replicate_states(model):
        _call_when_made(state, hook)
    return buckets


def _call_when_made(state: Any, hook: Callable[[Any], None]) -> None:
    """Call a function with the DDP that `replicate` makes in the first forward.

    `_ReplicateState.register_comm_hook` is what is called last when it is made, in torch 2.6.0 to 2.15.0.
    """
    before = state.register_comm_hook

    def note_ddp() -> None:
        before()
        hook(state._ddp)

    state.register_comm_hook = note_ddp


def _all_reduced(group: Any, bucket: _PartOfBucket) -> None:
    torch.distributed.all_reduce(bucket.buffer(), group=group)


def ddp_buckets(model: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield DDP's bucket sizes after its first step, and whether gradients are views of them.

    `_build_params_for_reducer`, in torch 2.6.0 to 2.15.0.
    """
    for ddp in _ddps(model):
        params = ddp._build_params_for_reducer()[0]
        for bucket in _buckets(ddp, params[::-1]) if _builds_again(ddp) else _buckets(ddp, params)[::-1]:
            yield sum(param.numel() * param.element_size() for param in bucket), bool(ddp.gradient_as_bucket_view)


def _ddps(model: nn.Module) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    replicated = [state._ddp for state in _replicate_states(model) if hasattr(state, "_ddp")]
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)] + replicated


def params_of_ddp(model: nn.Module) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield every parameter whose gradient DDP reduces, with the ranks of its group.

    `_module_parameters`, which its reducer was made of, in torch 2.6.0 to 2.15.0.
    """
    for ddp in _ddps(model):
        ranks = tuple(torch.distributed.get_process_group_ranks(ddp.process_group))
        for param in getattr(ddp, "_module_parameters", None) or ddp.module.parameters():
            yield param, ranks


def comm_hooks(model: nn.Module) -> list[str]:
    """Return the names of functions that reduce gradients in place of DDP: `bf16_compress_hook`.

    `_comm_hooks`, in torch 2.6.0 to 2.15.0.
    """
    hooks = (hook for ddp in _ddps(model) for hook, _ in ddp._comm_hooks)
    return [getattr(hook, "__name__", type(hook).__name__) for hook in hooks]


def running_ddp() -> Any:
    """Return the DDP whose forward runs now; None outside of one.

    `_get_active_ddp_module`, in torch 2.6.0 to 2.15.0.
    """
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def ran_without_sync(model: nn.Module) -> bool:
    """Whether the last forward of a DDP ran under `no_sync()`, which leaves what backward reduces to a later one.

    `require_forward_param_sync`, which a forward sets for the next one, in torch 2.6.0 to 2.15.0.
    """
    return any(not ddp.require_forward_param_sync for ddp in _ddps(model))


def lacks_parameters(model: nn.Module) -> bool:
    """Whether a DDP's reducer has fewer parameters than require gradients: some did not when it was made.

    `_get_ddp_logging_data`, whose `num_parameter_tensors` its reducer counts, in torch 2.6.0 to 2.15.0.
    """
    for ddp in _ddps(model):
        num_trainable = sum(param.requires_grad for param in getattr(ddp, "_module_parameters", ()))
        if num_trainable > ddp._get_ddp_logging_data().get("num_parameter_tensors", num_trainable):
            return True
    return False


def _replicate_states(model: nn.Module) -> list[Any]:
    """Return the states of modules that `replicate` was called with, in torch 2.6.0 to 2.15.0.

    The state has a DistributedDataParallel of the module's parameters, which is made in the first forward.
    """
    from torch.distributed._composable.replicate import _ReplicateState, replicate

    states: list[Any] = [replicate.state(module) for module in model.modules()]
    return [state for state in states if isinstance(state, _ReplicateState)]


def _builds_again(ddp: Any) -> bool:
    """Whether DDP rebuilds buckets after the first step, in the order that gradients came."""
    return _is_static(ddp) or not ddp.find_unused_parameters


_ASKED_TO_BE_STATIC: WeakSet[Any] = WeakSet()
"""Models for which `static_graph=True` was given although no other rank could agree to it."""


def _is_static(ddp: Any) -> bool:
    return bool(ddp.static_graph) or ddp in _ASKED_TO_BE_STATIC


def _buckets(ddp: Any, params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return parameters by buckets, filled in their order.

    `bucket_bytes_cap` and `_compute_bucket_assignment_by_size`, in torch 2.6.0 to 2.15.0.
    """
    if not params:
        return []
    distributed: Any = torch.distributed
    is_default = getattr(ddp, "bucket_bytes_cap_default", True)
    first = distributed._DEFAULT_FIRST_BUCKET_BYTES if is_default else ddp.bucket_bytes_cap
    limits = list(getattr(ddp, "bucket_bytes_cap_list", ())) or [first, ddp.bucket_bytes_cap]
    buckets = distributed._compute_bucket_assignment_by_size(list(params), limits, [False] * len(params))[0]
    return [[params[at] for at in bucket] for bucket in buckets]


@contextmanager
def _ddp_unasked() -> Iterator[None]:
    """Keep DistributedDataParallel from asking other ranks, and from deferring its first reduce.

    Its hooks are called by `ddp_alone`, and may be those that need a GPU. `_verify_param_shape_across_processes`,
    `_sync_module_states`, `_set_static_graph`, `_register_comm_hook` and `_check_comm_hook`, in torch 2.6.0 to 2.15.0.
    """
    from torch import distributed
    from torch.nn.parallel import distributed as ddp

    kind: Any = ddp.DistributedDataParallel
    check = kind._check_comm_hook

    def checked(self: Any, hook: Any) -> None:
        if not getattr(hook, "__name__", "").startswith("bf16_compress"):  # which torch refuses where it has no CUDA
            check(self, hook)

    def skipped(*_: object, **__: object) -> None: ...

    instead = (
        (ddp, "_verify_param_shape_across_processes", skipped),
        (ddp, "_sync_module_states", skipped),
        (kind, "_set_static_graph", lambda ddp: _ASKED_TO_BE_STATIC.add(ddp)),
        (distributed, "_register_comm_hook", skipped),
        (kind, "_check_comm_hook", checked),
    )
    with ExitStack() as stack:
        for owner, name, replacement in instead:
            stack.enter_context(replaced(owner, name, replacement))
        yield


def looks_for_unused(model: nn.Module) -> bool:
    """Whether DDP looks for unused parameters, which it reads from a tensor."""
    return any(ddp.find_unused_parameters for ddp in _ddps(model))


def only_in_first_step(model: nn.Module) -> int:
    """Return the bytes that DDP reduces only in its first step, with `static_graph=True`.

    That is an int32 for each parameter: whether it was used. Measured on torch 2.13.0.
    """
    static = [ddp for ddp in _ddps(model) if _is_static(ddp)]
    return sum(torch.int32.itemsize * len(ddp._build_params_for_reducer()[0]) for ddp in static)


def is_made_in_first_step(model: nn.Module) -> bool:
    """Whether there is a DistributedDataParallel that `replicate` makes in the first forward."""
    return bool(_replicate_states(model))


def has_ddp(model: nn.Module) -> bool:
    """Whether a model is or contains DistributedDataParallel, which hooks its parameters."""
    return bool(_ddps(model))
