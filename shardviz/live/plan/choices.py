"""A router's choices in a step without values: every expert equally often.

Numbers that follow from such choices alone are worked out beside the tensors without values: how many tokens an expert
gets, where they go, how many arrive. Code may then read them. Other ranks are taken to choose the same as this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from shardviz.live.compat.tensors import real_tensors
from shardviz.live.compat.worlds import ranks_of_operator
from shardviz.live.plan.forks import own_line
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

ATEN = torch.ops.aten

OF_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")
"""What FakeTensorMode raises if code reads values, or the size of a result depends on them."""

MOST = 1 << 24
"""Elements of a tensor whose numbers are worked out at most."""

CHOOSES = {ATEN.topk.default: 2, ATEN.max.dim: 1, ATEN.argmax.default: 1}
"""Operators that return positions, each with the number of the argument that says along which dim."""

FILLS: dict[Any, int] = {
    **{getattr(ATEN, name).default: 0 for name in ("zeros", "zeros_like", "new_zeros")},
    **{getattr(ATEN, name).default: 1 for name in ("ones", "ones_like", "new_ones")},
}
FILLS_WITH = {ATEN.full.default: 1, ATEN.full_like.default: 1, ATEN.new_full.default: 2, ATEN.scalar_tensor.default: 0}
"""Operators that fill a new tensor, with the number, or the number of the argument that says it."""

GROUPED = (ATEN._grouped_mm.default,) if hasattr(ATEN, "_grouped_mm") else ()
"""The grouped product, which torch has since 2.8."""

COUNTS = (ATEN.arange.default, ATEN.arange.start, ATEN.arange.start_step)

OUT_FIRST = ("alltoall_base_", "_allgather_base_")
"""Collectives of c10d that fill their first argument with what they make of the second."""

BY_INDEX = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default)
"""Operators that take masks as indices."""


@dataclass(slots=True)
class Origin:
    """Where the numbers of a storage come from.

    Attributes:
        choices: The calls that chose, a line each; empty if no number depends on a choice.
        is_lost: Whether something has been written to it that is not known.
    """

    choices: dict[str, None]
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """The numbers of a tensor without values."""

    values: Tensor
    origin: Origin


class Choices:
    """Gives a step's choices numbers, and works out what follows from them.

    Attributes:
        read: The calls whose choices the step has read, a line each.
    """

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()
        self.read: dict[str, None] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors without values, and on those inputs whose values are known."""
        if func in CHOOSES:
            return self._choose(func, func(*args, **kwargs), args)
        if func in FILLS or func in FILLS_WITH or func in COUNTS:
            return self._fill(func, func(*args, **kwargs), args, kwargs)
        if not len(self._known) and func not in GROUPED:
            return func(*args, **kwargs)
        if "c10d" in getattr(func, "namespace", ""):
            return self._exchange(func, func(*args, **kwargs), args)
        inputs = [self._of(tensor) for tensor in tensors_in((args, kwargs))]
        if inputs and None not in inputs and _is_pure(func):
            return self._run_on_values(func, args, kwargs, [known for known in inputs if known])
        self._forget(func, args)
        if func in GROUPED:
            return _grouped_product(func, *args, **kwargs)
        return func(*self._with_positions(func, args), **kwargs)

    def _of(self, tensor: Tensor) -> Known | None:
        known: Known | None = self._known.get(tensor)
        return None if known is None or known.origin.is_lost else known

    def _choose(self, func: Any, returned: Any, args: Any) -> Any:
        """Choose every position along a dim equally often, in turn."""
        indices = returned if torch.is_tensor(returned) else returned[1]
        dim = args[CHOOSES[func]] if len(args) > CHOOSES[func] else -1
        if 0 < indices.numel() <= MOST and dim is not None:
            with real_tensors():
                turns = torch.arange(indices.numel()).remainder(args[0].shape[dim]).view(indices.shape)
            self._known[indices] = Known(turns, Origin({f"{_name(func)}(){own_line()}": None}))
        return returned

    def _fill(self, func: Any, returned: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Remember a new tensor's numbers unless they are of floating point."""
        if returned.numel() > MOST or returned.is_floating_point() or returned.is_complex():
            return returned
        with real_tensors():
            if func in COUNTS:
                values = func(*args, **{**kwargs, "device": "cpu", "pin_memory": None})
            else:
                number = FILLS[func] if func in FILLS else args[FILLS_WITH[func]]
                values = torch.full(returned.shape, number, dtype=returned.dtype)
        self._known[returned] = Known(values, Origin({}))
        return returned

    def _exchange(self, func: Any, returned: Any, args: Any) -> Any:
        """Work out what this rank receives if every rank sends the same values."""
        ranks = ranks_of_operator(func, args)
        at = ranks.index(torch.distributed.get_rank())
        for sent, into in _flows(func, args, returned, at):
            sent_values = self._of(sent)
            with real_tensors():
                values = None if sent_values is None else received(func, sent_values.values, args, len(ranks), at)
            if sent_values is not None and values is not None and values.shape == into.shape:
                self._known[into] = Known(values, Origin(sent_values.origin.choices))
            else:
                self._known.pop(into, None)
        return returned

    def _run_on_values(self, func: Any, args: Any, kwargs: Any, inputs: list[Known]) -> Any:
        """Run an operator on known numbers too, which decide a result's size if it depends on them."""
        choices = {line: None for known in inputs for line in known.origin.choices}
        returned = None if func is ATEN._local_scalar_dense.default else _run_unless_value_dependent(func, args, kwargs)
        if any(tensor.numel() > MOST for tensor in tensors_in(returned)):
            self._forget(func, args)
            return returned
        with real_tensors():
            own_args, own_kwargs = tree_map_only(
                torch.Tensor, lambda tensor: self._known[tensor].values, (args, kwargs)
            )
            values = func(*own_args, **own_kwargs)
        if returned is None:
            self.read |= choices
            returned = tree_map_only(torch.Tensor, _without_values, values)
        for tensor, number in zip(tensors_in(returned), tensors_in(values), strict=True):
            self._known[tensor] = Known(number, _origin(number, inputs, choices))
        return returned

    def _forget(self, func: Any, args: Any) -> None:
        """Forget known values that an operator overwrites with unknown ones."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(value):
                    known_values = self._known.get(tensor)
                    if known_values is not None:
                        known_values.origin.is_lost = True

    def _with_positions(self, func: Any, args: Any) -> Any:
        """Return arguments with the positions that known masks select in place of the masks."""
        if func not in BY_INDEX:
            return args
        indices: list[Any] = []
        for index in args[1]:
            mask = self._of(index) if index is not None and index.dtype == torch.bool else None
            if mask is None:
                indices.append(index)
                continue
            self.read |= mask.origin.choices
            with real_tensors():
                positions = mask.values.nonzero(as_tuple=True)
            indices += map(_without_values, positions)
        return (args[0], indices, *args[2:])


def _run_unless_value_dependent(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on tensors without values; return None if its result depends on values."""
    try:
        return func(*args, **kwargs)
    except Exception as error:
        if type(error).__name__ not in OF_VALUES:
            raise
        return None


@lru_cache(maxsize=4096)
def _is_pure(func: Any) -> bool:
    """Whether an operator's result follows from its inputs."""
    return func.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in func.tags


def _grouped_product(func: Any, first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a grouped product in float32, which torch's shape function does not support."""
    if first.dtype != torch.float32 or second.dtype != torch.float32:
        return func(first, second, *args, **kwargs)
    return func(first.bfloat16(), second.bfloat16(), *args, **kwargs).float()


def _without_values(values: Tensor) -> Tensor:
    return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)


def _origin(values: Tensor, sources: list[Known], choices: dict[str, None]) -> Origin:
    """Return the origin of an operator's result: that of the input whose storage it shares."""
    for source in sources:
        if source.values.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
            source.origin.choices |= choices
            return source.origin
    return Origin(choices)


def _flows(func: Any, args: Any, returned: Any, at: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the tensors that a collective sends from position `at`, with those that they fill."""
    name = _name(func)
    if name in OUT_FIRST:
        return [(args[1], args[0])]
    if name == "allgather_":
        return [(sent, part) for sent, parts in zip(args[1], args[0], strict=True) for part in parts]
    if name == "alltoall_":
        return [(args[1][at], part) for part in args[0]]
    if "functional" in func.namespace and torch.is_tensor(returned):
        return [(args[0], returned)]
    return [
        (tensor, tensor)
        for arg in args
        for tensor in (arg if isinstance(arg, list) else [arg])
        if torch.is_tensor(tensor)
    ]


def received(func: Any, values: Tensor, args: Any, size: int, at: int) -> Tensor | None:
    """Return what a rank receives if all of its group send the same; None if that is unknown."""
    name = _name(func)
    if name in ("allgather_", "alltoall_"):
        return values
    if name in ("alltoall_base_", "all_to_all_single"):
        splits = args[4] if name == "alltoall_base_" else args[2]
        parts = torch.split(values, list(splits)) if splits else values.chunk(size)
        return torch.cat([parts[at]] * size) if len(parts) == size else None
    if name in ("_allgather_base_", "all_gather_into_tensor"):
        return torch.cat([values] * size)
    if name == "all_reduce":
        return values * size if args[1] == "sum" else values if args[1] in ("max", "min", "avg") else None
    return None


def _name(func: Any) -> str:
    """Return `alltoall_base_` for `c10d.alltoall_base_.default`."""
    return str(func.__name__).partition(".")[0]
