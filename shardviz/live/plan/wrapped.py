"""Tensors that wrap others, such as weights in 8 bits: a plan takes them apart, so that bytes are right.

A captured job names them and looks no further, since only their class knows what their elements mean. A plan has no
elements: it needs only to know how many there are, of how many bytes each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from shardviz.live.capture.locals import Local, of_tensor
from shardviz.live.compat import inner_tensors, local_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

    from shardviz.dump.records.base import Role


def taken_apart(locals_: Iterable[Local], tensors: Mapping[str, torch.Tensor]) -> Iterator[Local]:
    """Yield tensors; one that wraps others, which its name leads to, is replaced by them."""
    for local in locals_:
        parts = _parts_of(local.name, local.role, tensors[local.name]) if local.name in tensors else []
        yield from parts or [local]


def _parts_of(name: str, role: Role, tensor: torch.Tensor) -> list[Local]:
    """Return what a tensor is made of; nothing for a tensor with elements of its own.

    The part that has an element for each of its own is split as it is, and has its name and its gradient. The others,
    such as scales, are what this rank has of them: `up.weight.scale` of a weight, `up.weight.exp_avg_scale` of a state.
    """
    wrapper, parts = local_of(tensor), list[Local]()
    for attribute, part in inner_tensors(wrapper).items():
        if part.shape == wrapper.shape and not any(other.name == name for other in parts):
            parts.append(_main_part(name, role, part.detach(), tensor))
        else:
            part_name = f"{name}{'_' if role == 'optim' else '.'}{attribute.replace('.', '_')}"
            parts.append(Local(part_name, role, tuple(part.shape), part.detach()))
    return parts


def _main_part(name: str, role: Role, part: torch.Tensor, of: torch.Tensor) -> Local:
    """Return a part with the placements and the gradient of the tensor that it is of."""
    if isinstance(of, DTensor):
        shape, stride = of.shape, of.stride()
        part = DTensor.from_local(part, of.device_mesh, of.placements, run_check=False, shape=shape, stride=stride)
    local = of_tensor(name, role, part)
    if not of.is_leaf or of.grad is None:
        return local
    grad = of_tensor(name, "grad", of.grad)
    return replace(local, grad=grad.values, grad_claim=grad.claim)
