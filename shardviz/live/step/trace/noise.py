"""How far rounding alone takes a step in narrow numbers: the unsharded model's, from all it starts from moved a little.

Sums in another order, and terms that are rounded before they are summed, take a right sharded step about as far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardviz.dump.records.step import NoiseRecord
from shardviz.live.capture.locals import local_tensors
from shardviz.live.step.output_parts import wanted_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from shardviz.dump.records.base import Role
    from shardviz.live.step.unsharded.step import UnshardedStep

SEED = 3


def moved(build: Callable[[], nn.Module], precision: float) -> Callable[[], nn.Module]:
    """Return a function that builds a model with weights moved by a random relative error."""

    def built() -> nn.Module:
        model = build()
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(moved_tensor(parameter, precision, generator))
        return model

    return built


def moved_tensor(tensor: torch.Tensor, precision: float, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a tensor of floating point with every element moved by a random part of a relative precision."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(SEED) if generator is None else generator
    direction = torch.rand(tensor.shape, generator=generator, dtype=torch.float32) * 2 - 1
    return (tensor.detach().double() * (1 + precision * direction.to(tensor.device).double())).to(tensor.dtype)


def noise_of(reference: UnshardedStep, moved_step: UnshardedStep) -> Iterator[NoiseRecord]:
    """Yield how far the results of two steps of the unsharded model are apart."""
    others = {local.name: local.grad for local in local_tensors(moved_step.model) if local.role == "param"}
    for local in local_tensors(reference.model):
        grad = others.get(local.name)
        if local.role == "param" and local.grad is not None and grad is not None:
            yield _between("grad", local.name, local.grad, grad)
    yield _between("scalar", "loss", reference.step.loss, moved_step.step.loss)
    outputs = reference.step.output, moved_step.step.output
    if outputs[0] is not None and outputs[1] is not None and outputs[0].shape == outputs[1].shape:
        yield _between("output", "output", outputs[0], outputs[1])
    moved_outputs = wanted_outputs(moved_step)
    for name, output in wanted_outputs(reference).items():
        if name in moved_outputs and moved_outputs[name].whole.shape == output.whole.shape:
            yield _between("output", name, output.whole, moved_outputs[name].whole)


def _between(role: Role, name: str, first: torch.Tensor, second: torch.Tensor) -> NoiseRecord:
    first, second = first.detach().double(), second.detach().double()
    if not first.numel():
        return NoiseRecord(role, name, 0.0, 0.0)
    apart = (first - second).abs()
    sizes = float(apart.max()), float(apart.square().mean().sqrt())
    return NoiseRecord(role, name, *(number if number < float("inf") else 0.0 for number in sizes))
