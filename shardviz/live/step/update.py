"""The step of a probe's own optimizer, and its effect on gradients and weights, captured after backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.compat import clean_name, flat_params, unit_of
from shardviz.live.step.observe import optimizer_states
from shardviz.relate.tolerance import SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.locals import Local
    from shardviz.live.step.observe import Observed

ONE_OPTIMIZER = "return one torch.optim.Optimizer, or an object whose `optim` is one: a step of several is only planned"
"""What a probe's `optimizer()` has to return."""


@dataclass(frozen=True)
class Update:
    """The result of an optimizer's step.

    Attributes:
        tensors: Its state, and all parameters, after its step.
        not_checked: The parts of the result that cannot be checked, with the reason.
        not_stepped: Parameters that it does not step: in none of its groups, or with a learning rate of zero.
    """

    tensors: list[Local]
    not_checked: tuple[str, ...] = ()
    not_stepped: tuple[str, ...] = ()


def updated(probe: ModuleType, model: nn.Module, mesh: DeviceMesh, observation: Observed) -> torch.optim.Optimizer:
    """Let the probe's optimizer update the weights, with its collectives recorded, and return it.

    Raises:
        ProbeError: `optimizer()` returned something that has no state.
    """
    optimizer: torch.optim.Optimizer = probe.optimizer(model, mesh)
    if not hasattr(getattr(optimizer, "optim", optimizer), "state"):
        raise ProbeError(f"optimizer() returned {type(optimizer).__name__}, which has no state", ONE_OPTIMIZER)
    with observation.comms:
        optimizer.step()
    return optimizer


def copied_gradients(locals_: Sequence[Local]) -> list[Local]:
    """Return tensors with gradients of their own: an optimizer may clip or zero the model's."""
    return [one if one.grad is None else replace(one, grad=one.grad.clone()) for one in locals_]


def update_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, before: Sequence[Local], after: Sequence[Local]
) -> Update:
    """Return the result of an optimizer's step.

    Args:
        optimizer: The optimizer after its step.
        model: The model that it steps.
        before: The model's tensors before the step.
        after: The same after it.
    """
    rates = _rates(optimizer)
    by_name = dict(_rates_by_name(model, rates))
    notes: tuple[str, ...] = ()
    if not by_name:
        notes = (
            f"the optimizer's state: the optimizer steps {len(rates)} tensors, none of them a parameter of the model",
        )
    elif not any(by_name.values()):
        notes = ("the weights after the optimizer's step: its learning rate is 0",)
    weights = [one for one in after if one.role == "param"]
    idle = tuple(one.name for one in weights if by_name and not by_name.get(one.name))
    return Update([*optimizer_states(optimizer, model, before), *weights], notes, idle)


def _rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the learning rates of the tensors that an optimizer steps, by identity; 1 for a tensor without one."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(param): float(group.get("lr", 1.0)) for group in groups for param in group["params"]}


def _rates_by_name(model: nn.Module, rates: dict[int, float]) -> Iterator[tuple[str, float]]:
    units = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in rates:
            if (unit := unit_of(name)) is not None:
                units[unit] = rates[id(param)]
            else:
                yield clean_name(name), rates[id(param)]
    for flat in flat_params(model) if units else ():
        if flat.unit in units:
            yield flat.name, units[flat.unit]


def distinct_gradients(before: Sequence[Local], after: Sequence[Local]) -> list[Local]:
    """Return tensors with their gradients from backward, or from after the optimizer if ranks scaled them differently.

    An optimizer may clip gradients, but it must clip all parts of one gradient by the same factor. Every rank calls
    this.

    Args:
        before: This rank's tensors before the optimizer stepped.
        after: The same after it.
    """
    grads_after = {one.name: one for one in after}
    factors_here = {
        one.name: factor for one in before if (factor := _factor(one.grad, grads_after[one.name].grad)) is not None
    }
    by_name: dict[str, list[float]] = {}
    for factors in of_all_ranks(factors_here):
        for name, factor in factors.items():
            by_name.setdefault(name, []).append(factor)
    apart = {name for name, found in by_name.items() if max(found) - min(found) > SINGLE * max(map(abs, found))}
    return [replace(one, grad=grads_after[one.name].grad) if one.name in apart else one for one in before]


def _factor(before: torch.Tensor | None, after: torch.Tensor | None) -> float | None:
    """Return the factor by which a gradient was multiplied; None if it was not, or if that cannot be determined."""
    if before is None or after is None or before.shape != after.shape or not before.is_floating_point():
        return None
    square = float((before * before).sum())
    factor = float((before * after).sum()) / square if square else 0.0
    allowed = 4 * torch.finfo(before.dtype).eps * abs(factor)
    exact = bool(((after - before * factor).abs() <= allowed * before.abs().max()).all()) if factor else False
    return factor if exact else None
