"""Tensors without values, and what operators return on them."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import getweakrefcount

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.live.compat.modules import replaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def fake_mode() -> Any:
    """Return a mode in which tensors have no memory. Tried on torch 2.6.0, 2.13.0 and 2.15.0."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = _with_one_cpu(FakeTensorMode)
    return (_with_quick_keys(mode) if _has_known_cache(mode) else mode)(allow_non_fake_inputs=True)


@cache
def _with_one_cpu(kind: Any) -> Any:
    """Return a `FakeTensorMode` that treats accelerate's `cpu:0` as the device `cpu`.

    Only tensors with values are that: `FakeTensorMode.dispatch`, tried on torch 2.6.0, 2.13.0 and 2.15.0. Torch 2.6.0
    has no collectives for tensors without values, so there the fake world's answer, which looks at no numbers.
    """

    class OneCpu(kind):  # type: ignore[misc]
        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            device = kwargs.get("device") if kwargs else None
            if device is not None and device.type == "cpu" and device.index is not None:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            if func.namespace == "c10d" and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta"):
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
            return super().dispatch(func, types, args, kwargs or {})

    return OneCpu


@contextmanager
def fakes_converted(mode: Any) -> Iterator[None]:
    """Let modules without values be converted, as by `model.bfloat16()`.

    `nn.Module._apply` exchanges such parameters by `torch.utils.swap_tensors`, which refuses those to which there are
    weak references. The mode has one to each tensor that it has made, in `MetaConverter.tensor_memo`, so as to make it
    only once. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    before = torch.utils.swap_tensors

    def swapped(first: torch.Tensor, second: torch.Tensor) -> None:
        if getweakrefcount(first) or getweakrefcount(second):
            mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        before(first, second)  # type: ignore[no-untyped-call]

    with replaced(torch.utils, "swap_tensors", swapped):
        yield


class UnwrappedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode without the slow wrapper that torch adds for `torch.compile`.

    Overrides `_should_skip_dynamo`, tried on torch 2.13.0 and 2.15.0; 2.6.0 wraps none.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_fake(tensor: Any) -> bool:
    """Whether a tensor itself is fake, not what it wraps. Tried on torch 2.6.0 to 2.15.0."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def has_known_value(tensor: Any) -> bool:
    """Whether torch knows a fake tensor's value, as of `torch.tensor(0.0)`.

    An optimizer's count of steps is one. `FakeTensor.constant`, tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    return is_fake(tensor) and tensor.constant is not None


def _has_known_cache(kind: Any) -> bool:
    """Whether torch's cache is used as in 2.13.0; in 2.15.0 its functions take other arguments."""
    method = getattr(kind, "_output_from_cache_entry", None)
    return method is not None and [*signature(method).parameters] == ["self", "state", "entry", "key", "func", "args"]


def new_fakes() -> list[tuple[Any, Any]]:
    """Return the cache entries that `fake_mode` gained since the last call, for `know_fakes`."""
    learned = [((str(key[0]), *key[1:]), _FAKES[key]) for key in _NEW_FAKES]
    _NEW_FAKES.clear()
    return learned


def know_fakes(fakes: Iterable[tuple[Any, Any]]) -> None:
    """Take over another process's cache entries of operators on tensors without values."""
    for (name, *key_rest), cached in fakes:
        space, packet, overload = name.split(".")
        func = getattr(getattr(getattr(torch.ops, space), packet), overload)
        key = (func, *key_rest)
        _FAKES[key] = cached
        _NEW_FAKES.append(key)


_FAKES: dict[tuple[Any, ...], Any] = {}
"""What operators return, by operator and arguments: entries of torch's cache."""


_NEW_FAKES: list[tuple[Any, ...]] = []


_PLAIN_ARGUMENTS = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments, beside tensors and lists, whose values are part of an operator's key as they are."""


@cache
def _with_quick_keys(kind: Any) -> Any:
    """Return a `FakeTensorMode` whose cache lookups take a third of the time.

    torch makes a key of 17 attributes of every tensor, one by one in Python, for each operator of a step. The key here
    has those of them that do not follow from others, and leads to the same entry of torch's cache; if it is not
    sure, torch decides. `_cached_dispatch_impl`, `_make_cache_entry` and `_output_from_cache_entry` in torch 2.13.0.
    """

    class Quick(kind):  # type: ignore[misc]
        _used: tuple[Any, Any, Any] = None, None, None

        def __init__(self, **how: Any) -> None:
            super().__init__(**how)
            self._states: dict[torch.device, dict[str, Any]] = {}

        def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            if func is torch.ops.aten._unsafe_view.default:
                func = torch.ops.aten.view.default  # which is all that it does, but for autograd
            key = _quick_key(self, func, args, kwargs)
            cached = _FAKES.get(key) if key is not None else None
            if cached is not None:
                return self._make_fake(cached, func, args)
            try:
                returned = super()._cached_dispatch_impl(func, types, args, kwargs)
                if key is not None and args and self._used[0] is func and self._used[1] is args:
                    _FAKES[key] = self._used[2]
                    _NEW_FAKES.append(key)
            finally:
                self._used = None, None, None  # kept, its tensors would count as memory of the step
            return returned

        def _make_fake(self, cached: Any, func: Any, args: Any) -> Any:
            """Make the fake tensor of a cache entry without asking for its 20 attributes again."""
            metadata = _only_metadata(cached)
            state = self._states.get(metadata.device) if metadata is not None else None
            if state is None:
                fake = super()._output_from_cache_entry(None, cached, None, func, args)
                if metadata is not None and _is_plain(fake):
                    self._states[metadata.device] = dict(vars(fake))
                return fake
            with torch._C._DisableTorchDispatch():
                empty = torch.empty_strided(
                    metadata.shape,
                    metadata.stride,
                    dtype=metadata.dtype,
                    device="meta",
                    requires_grad=metadata.requires_grad,
                )
                if func.is_view:
                    storage = args[cached.output_infos[0].view_idx].untyped_storage()
                    empty.set_(storage, metadata.storage_offset, metadata.shape, metadata.stride)
            fake = _subclass(metadata.device, empty)
            fake.__dict__.update(state)
            return fake

        def _make_cache_entry(self, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
            cached = super()._make_cache_entry(state, key, func, args, kwargs, output)
            self._used = func, args, cached
            return cached

        def _output_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
            self._used = func, args, entry
            return super()._output_from_cache_entry(state, entry, key, func, args)

    return Quick


def _only_metadata(cached: Any) -> Any:
    """Return the metadata of a cache entry for one strided tensor; None for any other entry."""
    info = cached.output_infos[0]
    metadata = info.metadata
    if (
        cached.is_output_tuple
        or info.inplace_idx is not None
        or metadata is None
        or metadata.layout is not torch.strided
    ):
        return None
    return None if metadata.is_conj or metadata.is_neg or metadata.device.type not in ("cpu", "meta") else metadata


def _is_plain(fake: Any) -> bool:
    """Whether a new tensor only has its mode and device, and its data may not be read."""
    noted = {name for name, value in vars(fake).items() if value is not None}
    return noted == {"fake_mode", "_fake_device"} and not fake.fake_mode._allow_unsafe_data_ptr_access


def _subclass(device: torch.device, empty: torch.Tensor) -> Any:
    """Return a `FakeTensor` as its `__new__` begins to make it."""
    from torch._subclasses.fake_tensor import FakeTensor

    fake: Any = torch.Tensor._make_subclass(
        FakeTensor, empty, empty.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    return fake


def _quick_key(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return a cache key for an operator call; None if its arguments have no plain key."""
    parts: list[Any] = [func, torch.get_default_dtype(), torch._C._get_default_device()]
    if torch.is_inference_mode_enabled() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
        return None
    if not _add_to_key(mode, parts, args) or not _add_to_key(mode, parts, [*kwargs, *kwargs.values()]):
        return None
    return tuple(parts)


def _add_to_key(mode: Any, parts: list[Any], values: Any) -> bool:
    """Add arguments to a key; returns whether that is all there is to them."""
    parts += type(values), len(values)
    for argument in values:
        kind = type(argument)
        if kind in _PLAIN_ARGUMENTS and argument == argument:  # NaN is not
            parts += kind, argument
        elif kind is list or kind is tuple:
            if not _add_to_key(mode, parts, argument):
                return False
        elif getattr(argument, "fake_mode", None) is not mode or not _add_tensor(parts, argument):
            return False
    return True


def _add_tensor(parts: list[Any], fake: Any) -> bool:
    if fake.constant is not None or fake.layout is not torch.strided or fake.is_quantized or fake.is_inference():
        return False
    if fake._has_symbolic_sizes_strides:
        return False
    parts += fake.dtype, fake.shape, fake.stride(), fake.storage_offset(), fake.untyped_storage().nbytes()
    parts += fake.fake_device, fake.requires_grad, fake.is_conj(), fake.is_neg()
    return True


def answered_alone(func: Any, args: Any) -> Any:
    """Return a fake tensor's device without asking every mode; None for other operators.

    `prim.device` and `FakeTensor.fake_device`, tried on torch 2.6.0 to 2.15.0: half of all that modes see in a step.
    """
    if func is not torch.ops.prim.device.default or not hasattr(args[0], "fake_device"):
        return None
    return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device


class _Answered:
    """What an `all_reduce` that does not wait returns, with a future that has its tensors."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def get_future(self) -> Any:
        done: Any = torch.futures.Future()
        done.set_result([self._tensor])
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def futures_answered() -> Iterator[None]:
    """Give futures of `all_reduce` their tensors, for hooks; a fake world's futures have none."""
    from torch import distributed

    before: Any = distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = before(tensor, *args, **kwargs)
        return None if work is None else _Answered(work, tensor)

    with replaced(distributed, "all_reduce", all_reduce):
        yield
