"""Functions of DTensors, forward and backward, against what they give of the whole tensor.

Whatever the placements are, a function of a DTensor returns what it returns of the whole, and so does its backward.
Functions that torch refuses, because it has no rule for them, are none of the audit's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional

from shardviz.relate.tolerance import EXACT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.audit.cases import Case


def difference(case: Case, mesh: DeviceMesh, placements: Sequence[Any]) -> str:
    """Return how a function's result or gradient differs from that of the whole; empty if neither does."""
    whole = tensor_of(case.shape)
    wanted, upstream, wanted_gradient = _results(case.function, whole, None)
    sharded = distribute_tensor(whole, mesh, placements)
    try:
        result, _, gradient = _results(case.function, sharded, upstream)
    except (RuntimeError, NotImplementedError, AssertionError):
        return ""
    if not _is_equal(result, wanted):
        return "its result is not that of the whole tensor"
    if _is_equal(gradient, wanted_gradient):
        return ""
    is_alike = gradient.shape == wanted_gradient.shape
    times = (gradient.abs().max() / wanted_gradient.abs().max()).item() if is_alike else 0.0
    is_multiple = bool(times) and _is_equal(gradient, times * wanted_gradient)
    return f"its gradient is {f'{times:.5g} times' if is_multiple else 'not'} that of the whole tensor"


def tensor_of(shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor that functions are tried on: numbers between 0 and 1, no two of them equal."""
    return torch.rand(tuple(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _results(
    function: str, tensor: torch.Tensor, upstream: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a function's result, the gradient that it is given, and that which comes back."""
    with torch.enable_grad():
        given = tensor.detach().requires_grad_()
        made = eval(function, {"torch": torch, "F": functional}, {"x": given})
        if upstream is None:
            upstream = tensor_of(made.shape)
        back = upstream
        if isinstance(made, DTensor):
            back = distribute_tensor(upstream, made.device_mesh, [Replicate()] * made.device_mesh.ndim)
        (gradient,) = torch.autograd.grad(made, given, back)
    return _whole(made), upstream, _whole(gradient)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _is_equal(tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
    return tensor.shape == wanted.shape and torch.allclose(tensor, wanted, rtol=EXACT, atol=EXACT)
