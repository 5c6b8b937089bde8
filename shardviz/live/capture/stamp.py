"""Stamping: fill every weight of an unsharded model with its own global index, and read it back.

Ids count from 1 over the whole model, row-major in each tensor, in the order of `named_parameters` and then
`named_buffers`. Parameters that share storage get one range of ids. If a dtype cannot hold every id exactly, the ids
are written one digit per pass, and `shardviz.live.capture.passes` puts them together again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from shardviz.dump.records import NO_IDS, Role, Stamp
from shardviz.errors import ShardvizError
from shardviz.live.claims.wrappers import adapted_layers, without_adapter
from shardviz.live.compat import DTensor, clean_name, has_storage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

_stamped: WeakKeyDictionary[nn.Module, Stamped] = WeakKeyDictionary()
"""The result of stamping, for models that still exist."""

EXACT_BITS = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.int64: 62,
    torch.int32: 31,
    torch.int16: 15,
    torch.int8: 7,
    torch.uint8: 8,
}
"""Every integer up to 2 to this power is exact: the significand's bits, the hidden one included, or the integer's."""


@dataclass(frozen=True)
class Stamped:
    """The result of stamping a model.

    Attributes:
        stamps: Every stamped tensor, in model order.
        not_applied: Tensors that did not read back as written: `(name, reason)`.
        not_stamped: Tensors that cannot hold ids: `(name, reason)`.
        shapes: The unsharded shapes of `not_stamped`, by name.
        not_exact: Tensors that were not filled because whole ids would be rounded: `(name, reason)`.
    """

    stamps: tuple[Stamp, ...]
    not_applied: tuple[tuple[str, str], ...] = ()
    not_stamped: tuple[tuple[str, str], ...] = ()
    not_exact: tuple[tuple[str, str], ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The largest id; 0 if there is none."""
        return max((stamp.last for stamp in self.stamps), default=0)


@dataclass(frozen=True)
class Digits:
    """Ids written one digit per pass: pass `place` writes each id's digit in base `base`, plus 1 so none is zero."""

    base: int
    place: int


def exact_bits(dtype: torch.dtype) -> int:
    """Return how many bits of an integer the dtype holds exactly; 0 if it cannot hold ids."""
    return EXACT_BITS.get(dtype, 0)


def stamp(model: nn.Module, digits: Digits | None = None) -> Stamped:
    """Fill every parameter and buffer of an unsharded model with ids, in place, and read them back.

    Args:
        model: A model that is not sharded yet: a fill through placements would only repeat their claims.
        digits: Write one digit of each id instead of the whole id.

    Returns:
        The ids of every tensor, for `shardviz.capture` and `assert_ordered`.

    Raises:
        ShardvizError: A tensor is already a DTensor, or is on the meta device, where it has no values to fill.

    Example:
        Before sharding, on every rank:

            model = build()
            stamps = shardviz.stamp(model)
            parallelize(model, mesh)
            shardviz.capture(model, "sharding.shardviz", mesh=mesh, stamps=stamps)
    """
    last = Stamped(plan(model)).last
    stamps, not_applied, not_stamped, not_exact = [], [], [], []
    shapes = {}
    for one, tensor in _numbered(model):
        if not exact_bits(tensor.dtype):
            not_stamped.append((one.name, f"{tensor.dtype} {NO_IDS}"))
            shapes[one.name] = one.shape
            continue
        stamps.append(one)
        if digits is None and last >= 2 ** exact_bits(tensor.dtype):
            not_exact.append((one.name, inexact(last, tensor.dtype)))
        elif not one.tied_to and (wrong := _fill(tensor, one.first, digits)):
            not_applied.append((one.name, f"{wrong:,} of {tensor.numel():,} elements did not read back as written"))
    done = Stamped(tuple(stamps), tuple(not_applied), tuple(not_stamped), tuple(not_exact), shapes)
    if digits is None:
        _stamped[model] = done
    return done


def plan(model: nn.Module) -> tuple[Stamp, ...]:
    """Return the stamps that an unsharded model would get, without changing it.

    Raises:
        ShardvizError: As `stamp`.
    """
    return tuple(one for one, tensor in _numbered(model) if exact_bits(tensor.dtype))


def _numbered(model: nn.Module) -> Iterator[tuple[Stamp, torch.Tensor]]:
    """Yield every tensor of an unsharded model with its stamp; a dtype that cannot hold ids uses none up."""
    seen: dict[tuple[int, int, tuple[int, ...]], Stamp] = {}
    first = 1
    for role, called, tensor in named_tensors(model):
        name = clean_name(called)
        _refuse_sharded(name, tensor)
        own = Stamp(name, first, tuple(tensor.shape), role)
        same = seen.setdefault(storage_key(tensor), own) if tensor.numel() else own
        if same is not own:
            own = Stamp(name, same.first, own.shape, role, tied_to=same.name)
        elif exact_bits(tensor.dtype):
            first += tensor.numel()
        yield own, tensor


def inexact(last: int, dtype: torch.dtype) -> str:
    """Return the sentence that a dtype cannot hold a model's ids."""
    return f"ids up to {last:,} are not exact in {dtype}"


def stamps_of(model: nn.Module) -> Stamped | None:
    """Return the result of `stamp` for a model, or for the model inside a wrapper; None if it was not stamped."""
    return next((_stamped[module] for module in model.modules() if module in _stamped), None)


def named_tensors(model: nn.Module) -> Iterator[tuple[Role, str, torch.Tensor]]:
    """Yield every parameter, then every buffer, tied names included; an adapted layer's own have its own names."""
    adapted = adapted_layers(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "param", without_adapter(name, adapted), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer", without_adapter(name, adapted), buffer


def tied_names(model: nn.Module, prefix: str = "") -> list[tuple[str, ...]]:
    """Return the groups of names that share storage on this rank, each name with a prefix."""
    groups: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
    for _, name, tensor in named_tensors(model):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel():
            groups.setdefault(storage_key(local), []).append(prefix + clean_name(name))
    return [tuple(names) for names in groups.values() if len(names) > 1]


def storage_key(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return a key that is equal for two tensors which are views of the same elements."""
    if not has_storage(tensor):
        return id(tensor), 0, tuple(tensor.shape)
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tuple(tensor.shape)


def _refuse_sharded(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise ShardvizError(f"{name} is already sharded", "stamp the model before it is parallelized")
    if tensor.is_meta:
        raise ShardvizError(
            f"{name} is on the meta device and has no values",
            "build it with values, and move it to meta when you shard it, as the probe fsdp_meta does",
        )


def _fill(tensor: torch.Tensor, first: int, digits: Digits | None) -> int:
    """Write ids and read them back; return how many elements differ from the ids written."""
    ids = torch.arange(first, first + tensor.numel(), dtype=torch.int64, device=tensor.device).view(tensor.shape)
    if digits is not None:
        ids = ids // digits.base**digits.place % digits.base + 1
    with torch.no_grad():
        tensor.copy_(ids)
        return int((tensor.detach().to(torch.int64) != ids).sum())
