"""What a collective gives a rank whose neighbours all send the same as it does: for numbers that a plan works out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

OUT_FIRST = ("alltoall_base_", "_allgather_base_")
"""Collectives of c10d that fill their first argument with what they make of the second."""


def flows(func: Any, args: Any, returned: Any, at: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Return what is sent by a collective, each with the tensor that is filled with it.

    Args:
        func: The operator.
        args: Its arguments.
        returned: What it has returned.
        at: The position of this rank in its group.
    """
    name = _name(func)
    if name in OUT_FIRST:
        return [(args[1], args[0])]
    if name == "allgather_":
        return [(sent, one) for sent, parts in zip(args[1], args[0], strict=True) for one in parts]
    if name == "alltoall_":
        return [(args[1][at], one) for one in args[0]]
    if "functional" in func.namespace and torch.is_tensor(returned):
        return [(args[0], returned)]
    return [(one, one) for arg in args for one in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(one)]


def received(func: Any, values: Tensor, args: Any, size: int, at: int) -> Tensor | None:
    """Return what a rank receives where every rank of its group sends the same; None where that is not known here.

    Args:
        func: The operator.
        values: What each of them sends.
        args: The operator's arguments.
        size: How many they are.
        at: The position of this rank among them.
    """
    name = _name(func)
    if name in ("wait_tensor", "allgather_", "alltoall_"):
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
