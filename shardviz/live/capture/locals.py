"""A model's tensors as this rank has them: plain and detached, each with its claimed mesh and placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardviz.dump.records import FlatRecord
from shardviz.live.capture.meshes import Claim, of_flat_param, on_root
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.compat import DTensor, clean_name, flat_params, placement_of, unit_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from shardviz.dump.records import Role
    from shardviz.layout.mesh import Mesh


@dataclass(frozen=True)
class Local:
    """One tensor as this rank has it.

    Attributes:
        name: Its fully qualified name.
        role: Its role in the model.
        shape: The global shape.
        values: This rank's part, plain and detached.
        claim: Its mesh and placements; None for a plain tensor.
        flat: Its place in FSDP1's concatenation, with that concatenation's length.
        grad: This rank's part of `.grad`, if there is one.
        grad_claim: The gradient's own mesh and placements, if it is a DTensor.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    values: torch.Tensor
    claim: Claim | None = None
    flat: tuple[FlatRecord, int] | None = None
    grad: torch.Tensor | None = None
    grad_claim: Claim | None = None

    @property
    def claimed_shape(self) -> tuple[int, ...]:
        """The shape that the placements refer to: FSDP1's concatenation, or the global shape."""
        return (self.flat[1],) if self.flat else self.shape


def local_tensors(model: nn.Module, mesh: Mesh | None = None) -> Iterator[Local]:
    """Yield every parameter and buffer of a model, FSDP1's flat parameters split into the original ones.

    Args:
        model: Sharded or not.
        mesh: The run's mesh, whose axes give FSDP1's groups their names.
    """
    flat_names = set()
    for param in flat_params(model):
        flat_names.add(param.name)
        grad = None if param.grad is None else param.cut(param.grad.detach())
        # The notation has no layout for a stretch of a tensor-parallel shard: its ids show where it is.
        is_layout = param.shape == param.whole
        record = (FlatRecord(param.shape, param.offset), param.total) if is_layout else None
        claim = of_flat_param(param, mesh) if is_layout else None
        yield Local(param.name, "param", param.whole, param.cut(param.local), claim, record, grad)
    for role, name, tensor in named_tensors(model):
        cleaned = clean_name(name)
        if cleaned not in flat_names and unit_of(name) is None:
            yield of_tensor(cleaned, role, tensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel or DataParallel, which add `module.` to every name."""
    return model.module if isinstance(model, DistributedDataParallel | DataParallel) else model


def of_tensor(name: str, role: Role, tensor: torch.Tensor) -> Local:
    """Return this rank's part of a plain tensor or a DTensor."""
    grad = tensor.grad if tensor.is_leaf else None
    values, claim = _taken_apart(tensor.detach())
    grad_values, grad_claim = _taken_apart(grad.detach()) if grad is not None else (None, None)
    return Local(name, role, tuple(tensor.shape), values, claim, grad=grad_values, grad_claim=grad_claim)


def _taken_apart(tensor: torch.Tensor) -> tuple[torch.Tensor, Claim | None]:
    if not isinstance(tensor, DTensor):
        return tensor, None
    claim = on_root(tensor.device_mesh, [placement_of(p) for p in tensor.placements])
    return tensor.to_local(), claim
