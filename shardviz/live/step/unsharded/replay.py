"""Expected gradients of a module's weights, replayed from the sharded step's activations.

In narrow numbers two right steps drift apart from layer to layer, so that a gradient that is off by a hundredth does
not show beside the unsharded model's. It does beside this: the unsharded module, run in float64 on what all ranks
together gave the sharded one, and on the gradient that came back. Only the rounding of the gradient itself is left.

Modules without modules in them that are called once are run again, if that makes the unsharded step's own gradients.
"""

from __future__ import annotations

from copy import deepcopy
from pickle import PicklingError
from typing import TYPE_CHECKING

import torch

from shardviz.dump.records.step import of_replay
from shardviz.live.capture.locals import Local
from shardviz.live.compat.modules import clean_name
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import LEAST_FACTOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from shardviz.check.step.trace.step_judge import Sides, StepJudge
    from shardviz.live.capture.capture import Capture
    from shardviz.live.step.unsharded.step import UnshardedStep


def add_replayed(capture: Capture, judge: StepJudge, reference: UnshardedStep) -> None:
    """Record, of a step in narrow numbers, the gradients that the sharded modules' own activations make.

    Args:
        capture: Rank 0's.
        judge: What judged the step.
        reference: The unsharded model's.
    """
    leaves = dict(_leaves(reference.model))
    weights = {local.name: local for local in reference.before if local.role == "param"}
    for name, sharded, unsharded in judge.sides(list(leaves)):
        for weight, gradient in _of_module(name, leaves[name], weights, sharded, unsharded):
            local = Local(of_replay(weight), "activation", tuple(gradient.shape), gradient.float())
            capture.add_values(local, "reference")


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name and not any(True for _ in module.children()) and any(True for _ in module.parameters()):
            yield clean_name(name), module


def _of_module(
    name: str, module: nn.Module, weights: Mapping[str, Local], sharded: Sides, unsharded: Sides
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's replayed gradients if replaying the unsharded step gives its own."""
    reference = _gradients(name, module, weights, unsharded)
    expected = _gradients(name, module, weights, sharded) if reference else {}
    for weight, gradient in reference.items():
        local = dict(module.named_parameters())[weight.removeprefix(f"{name}.")].grad
        if local is not None and weight in expected:
            factor = factor_of(local.detach().double().cpu().numpy(), gradient.double().cpu().numpy())
            if factor is not None and abs(factor - 1) <= LEAST_FACTOR:
                yield weight, expected[weight]


def _gradients(name: str, module: nn.Module, weights: Mapping[str, Local], sides: Sides) -> dict[str, torch.Tensor]:
    """Run a module in float64, with its weights before the step; return nothing if that cannot be done."""
    if any(f"{name}.{own}" not in weights for own, _ in module.named_parameters()):
        return {}
    try:
        again = deepcopy(module).cpu().double()
    except (TypeError, RuntimeError, PicklingError):  # it has something that cannot be copied
        return {}
    with torch.no_grad():
        for weight_name, parameter in again.named_parameters():
            parameter.copy_(weights[f"{name}.{weight_name}"].values)
            parameter.grad = None
    if not _runs_back(again, sides):
        return {}
    by_weight = {f"{name}.{own}": one.grad for own, one in again.named_parameters() if one.grad is not None}
    return {weight: gradient for weight, gradient in by_weight.items() if bool(gradient.isfinite().all())}


def _runs_back(module: nn.Module, sides: Sides) -> bool:
    """Run a module forward and backward; whether it could be run by its first input alone."""
    try:
        inputs, back = map(torch.tensor, sides)
        output = module(inputs)
        if torch.is_tensor(output) and output.shape == back.shape:
            torch.autograd.backward(output, back)
            return True
    except Exception:  # a module of a user's own may raise anything where it is called otherwise than by its model
        return False
    return False
