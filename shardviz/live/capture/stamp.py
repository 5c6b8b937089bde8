"""Stamping: fill an unsharded model's weights with their global indices, and verify them.

Ids count from 1 over the whole model, row-major in each tensor, in the order of `named_parameters` and then
`named_buffers`. Parameters that share storage get one range of ids. A tensor whose dtype cannot hold its ids exactly
gets a fill of its own (`shardviz.stamping.fill`), which shows the same in any dtype and at any size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from shardviz.dump.records.tensors import Stamp
from shardviz.errors import ShardvizError
from shardviz.live.claims.wrappers import adapted_layers, without_adapter
from shardviz.live.compat.modules import clean_name, computed_buffers
from shardviz.live.compat.tensors import has_storage, id_without_memory
from shardviz.reference.lookup import bits_of
from shardviz.reference.names import matched
from shardviz.stamping.fill import Fill, can_fill

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from shardviz.checkpoint.records import Entry
    from shardviz.dump.records.base import Role

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


_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


MAX_BUFFER = 1 << 24
"""Elements of a buffer of which a copy is kept."""


class Before(NamedTuple):
    """A buffer before the model was filled.

    Attributes:
        is_saved: Whether checkpoints have it.
    """

    values: torch.Tensor
    is_saved: bool


@dataclass(frozen=True)
class Stamped:
    """The result of stamping a model.

    Attributes:
        stamps: Every stamped tensor, in model order.
        not_applied: Tensors that did not read back as written: `(name, reason)`.
        not_stamped: Tensors that cannot hold ids: `(name, reason)`.
        shapes: The unsharded shapes of `not_stamped`, by name.
        fills: The fills of the tensors whose dtypes cannot hold their ids, by name.
        buffers: Buffers before they were filled, by name, without large ones.
    """

    stamps: tuple[Stamp, ...]
    not_applied: tuple[tuple[str, str], ...] = ()
    not_stamped: tuple[tuple[str, str], ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fills: Mapping[str, Fill] = field(default_factory=dict)
    buffers: Mapping[str, Before] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The largest id; 0 if there is none."""
        return max((stamp.last for stamp in self.stamps), default=0)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def exact_bits(dtype: torch.dtype) -> int:
    """Return how many bits of an integer the dtype holds exactly; 0 if it cannot hold ids."""
    return EXACT_BITS.get(dtype, 0)


def stamp(model: nn.Module, bits: int = 64) -> Stamped:
    """Fill an unsharded model's parameters and buffers with ids, in place, and verify them.

    Tensors whose dtype cannot hold their ids exactly are filled with values that show the same. Cast the model before
    it is stamped: a cast afterwards rounds ids, but for those that `bits` is given for.

    Args:
        model: A model that is not sharded yet: a fill through placements would only repeat their claims.
        bits: Integers up to 2**bits survive a cast that follows. If an id is larger, every tensor is filled with other
            values instead.

    Returns:
        The ids of every tensor, for `shardviz.capture` and `assert_ordered`.

    Raises:
        ShardvizError: A tensor is already a DTensor, or is on the meta device and has no values to fill.

    Example:
        Before sharding, on every rank:

            model = build()
            stamps = shardviz.stamp(model)
            parallelize(model, mesh)
            shardviz.capture(model, "sharding.shardviz", mesh=mesh, stamps=stamps)
    """
    last = Stamped(plan(model)).last
    stamps, not_applied, not_stamped = [], [], []
    shapes, fills, buffers = {}, {}, _before_filling(model)
    for tensor_stamp, tensor in _stamped_tensors(model):
        if not _can_stamp(tensor.dtype):
            not_stamped.append((tensor_stamp.name, f"{tensor.dtype} cannot hold ids"))
            shapes[tensor_stamp.name] = tensor_stamp.shape
            continue
        stamps.append(tensor_stamp)
        if last >= 2 ** min(bits, exact_bits(tensor.dtype)):
            fills[tensor_stamp.name] = Fill(
                tensor_stamp.tied_to or tensor_stamp.name, tensor_stamp.shape, dtype_name(tensor.dtype)
            )
        if not tensor_stamp.tied_to and (wrong := _write(tensor, tensor_stamp.first, fills.get(tensor_stamp.name))):
            not_applied.append(
                (tensor_stamp.name, f"{wrong:,} of {tensor.numel():,} elements did not read back as written")
            )
    done = Stamped(tuple(stamps), tuple(not_applied), tuple(not_stamped), shapes, fills, buffers)
    _stamped[model] = done
    return done


def _before_filling(model: nn.Module) -> dict[str, Before]:
    """Return copies of a model's buffers, without large ones, and those of formats of eight bits or fewer."""
    not_saved = computed_buffers(model)
    buffers = ((clean_name(name), tensor) for role, name, tensor in named_tensors(model) if role == "buffer")
    readable = ((name, tensor) for name, tensor in buffers if is_readable(tensor))
    small = ((name, tensor) for name, tensor in readable if 0 < tensor.numel() <= MAX_BUFFER)
    return {name: Before(tensor.detach().cpu().clone(), name not in not_saved) for name, tensor in small}


def is_readable(values: torch.Tensor) -> bool:
    """Whether torch compares and copies values of this kind in all of its versions."""
    is_narrow = values.is_floating_point() and values.dtype.itemsize == 1
    return values.layout == torch.strided and not (values.is_meta or values.is_quantized or is_narrow)


def plan(model: nn.Module) -> tuple[Stamp, ...]:
    """Return the stamps that an unsharded model would get, without changing it.

    Raises:
        ShardvizError: As `stamp`.
    """
    return tuple(stamp for stamp, tensor in _stamped_tensors(model) if _can_stamp(tensor.dtype))


def _stamped_tensors(model: nn.Module) -> Iterator[tuple[Stamp, torch.Tensor]]:
    """Yield an unsharded model's tensors with their stamps; a dtype without ids uses none up."""
    by_storage: dict[tuple[int, int, tuple[int, ...]], Stamp] = {}
    first = 1
    for role, called, tensor in named_tensors(model):
        name = clean_name(called)
        _refuse_sharded(name, tensor)
        tensor_stamp = Stamp(name, first, tuple(tensor.shape), role)
        same = by_storage.setdefault(storage_key(tensor), tensor_stamp) if tensor.numel() else tensor_stamp
        if same is not tensor_stamp:
            tensor_stamp = Stamp(name, same.first, tensor_stamp.shape, role, tied_to=same.name)
        elif _can_stamp(tensor.dtype):
            first += tensor.numel()
        yield tensor_stamp, tensor


def inexact(last: int, dtype: torch.dtype) -> str:
    """Return the sentence that ids were lost in a cast to a dtype that cannot hold them."""
    return f"ids up to {last:,} are not exact in {dtype}, to which it was cast after shardviz.stamp"


def stamps_of(model: nn.Module) -> Stamped | None:
    """Return `stamp`'s result for a model or one inside a wrapper; None if it wasn't stamped."""
    return next((_stamped[module] for module in model.modules() if module in _stamped), None)


def under_names(stamped: Stamped, names: Sequence[str]) -> Stamped:
    """Return the result of stamping under the names that a model's tensors have now.

    Adapters, as peft adds them after stamping, put words before and into the names of what they wrap.
    """
    now = {then: name for name, then in matched(names, [stamp.name for stamp in stamped.stamps]).names.items()}
    if all(then == name for then, name in now.items()):
        return stamped

    def renamed(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((now.get(name, name), why) for name, why in pairs)

    return Stamped(
        tuple(
            msgspec.structs.replace(
                unprefixed,
                name=now.get(unprefixed.name, unprefixed.name),
                tied_to=now.get(unprefixed.tied_to, unprefixed.tied_to),
            )
            for unprefixed in stamped.stamps
        ),
        renamed(stamped.not_applied),
        renamed(stamped.not_stamped),
        {now.get(name, name): shape for name, shape in stamped.shapes.items()},
        {now.get(name, name): fill for name, fill in stamped.fills.items()},
        {now.get(name, name): before for name, before in stamped.buffers.items()},
    )


def named_tensors(model: nn.Module) -> Iterator[tuple[Role, str, torch.Tensor]]:
    """Yield all parameters, then all buffers, tied names included, without adapters' prefixes."""
    adapted = adapted_layers(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "param", without_adapter(name, adapted), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer", without_adapter(name, adapted), buffer


def tied_names(model: nn.Module, prefix: str = "") -> list[tuple[str, ...]]:
    """Return the groups of names that share storage on this rank, each name with a prefix.

    A tensor without elements here is tied to itself under its other names: ZeRO-3 empties its parameters.
    """
    groups: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
    for _, name, tensor in named_tensors(model):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = storage_key(local) if local.numel() else (id(tensor), 0, ())
        groups.setdefault(key, []).append(prefix + clean_name(name))
    return [tuple(names) for names in groups.values() if len(names) > 1]


def storage_key(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return a key that is equal for two tensors which are views of the same elements."""
    if not has_storage(tensor):
        return id(tensor), 0, tuple(tensor.shape)
    storage = tensor.untyped_storage()
    return storage.data_ptr() or id_without_memory(storage), int(tensor.storage_offset()), tuple(tensor.shape)


def _refuse_sharded(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise ShardvizError(f"{name} is already sharded", "stamp the model before it is parallelized")
    if tensor.is_meta:
        raise ShardvizError(
            f"{name} is on the meta device and has no values",
            "build it with values, and move it to meta when you shard it, as the probe fsdp_meta does",
        )


def _can_stamp(dtype: torch.dtype) -> bool:
    return bool(exact_bits(dtype)) or can_fill(dtype_name(dtype))


def _write(tensor: torch.Tensor, first: int, fill: Fill | None) -> int:
    """Write ids or a fill and read them back; return how many elements differ."""
    if fill is not None:
        with torch.no_grad():
            tensor.copy_(values_of(fill))
        return int(np.count_nonzero(bits_of_tensor(tensor) != fill.bits))
    ids = torch.arange(first, first + tensor.numel(), dtype=torch.int64, device=tensor.device).view(tensor.shape)
    with torch.no_grad():
        tensor.copy_(ids)
        return int((tensor.detach().to(torch.int64) != ids).sum())


def values_of(entry: Entry) -> torch.Tensor:
    """Return a fill, or a tensor of a reference, in its dtype, on the CPU."""
    return from_bits(entry.bits, getattr(torch, entry.dtype))


def from_bits(bits: NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
    """Return bits as a tensor of a dtype of their width, on the CPU."""
    flat = torch.from_numpy(np.array(bits, order="C").view(f"i{bits.itemsize}").reshape(-1))
    return flat.view(dtype).view(bits.shape)


def bits_of_tensor(values: torch.Tensor) -> NDArray[np.generic]:
    """Return a plain tensor's bits as unsigned integers, in its shape."""
    flat = values.detach().cpu().contiguous().view(-1)
    return bits_of(flat.view(_INTS[flat.element_size()]).numpy()).reshape(tuple(values.shape))
