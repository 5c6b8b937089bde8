"""What a probe's own optimizer makes of gradients and weights, once the step is written down as backward left it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.compat import clean_name, flat_params
from shardviz.live.step.observe import optimizer_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.locals import Local
    from shardviz.live.step.observe import Observed

ALIKE = 1e-6
"""How near, relative to it, the numbers are by which ranks scaled a gradient together, as clipping does."""


@dataclass(frozen=True)
class Update:
    """What a probe's optimizer left behind.

    Attributes:
        tensors: Its state, and the parameters that it steps, after its step.
        not_checked: What cannot be said of it, and why.
    """

    tensors: list[Local]
    not_checked: tuple[str, ...] = ()


def updated(probe: ModuleType, model: nn.Module, mesh: DeviceMesh, seen: Observed) -> torch.optim.Optimizer:
    """Let the probe's optimizer update the weights, watched as the step was, and return it."""
    optimizer: torch.optim.Optimizer = probe.optimizer(model, mesh)
    with seen.comms:
        optimizer.step()
    return optimizer


def copied_gradients(locals_: Sequence[Local]) -> list[Local]:
    """Return tensors with gradients of their own: an optimizer may clip or zero the model's."""
    return [one if one.grad is None else replace(one, grad=one.grad.clone()) for one in locals_]


def update_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, before: Sequence[Local], after: Sequence[Local]
) -> Update:
    """Return what an optimizer left behind.

    Args:
        optimizer: After its step.
        model: The model that it steps.
        before: The model's tensors before the step.
        after: The same after it.
    """
    rates = _rates(optimizer)
    own = dict(_rates_by_name(model, rates))
    notes: tuple[str, ...] = ()
    if not own:
        notes = (f"the optimizer's state: none of the {len(rates)} tensors that it steps is a parameter of the model",)
    elif not any(own.values()):
        notes = ("the weights after the optimizer's step: its learning rate is 0",)
    weights = [one for one in after if one.role == "param" and (own.get(one.name) or not own)]
    return Update([*optimizer_states(optimizer, model, before), *weights], notes)


def _rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the learning rates of the tensors that an optimizer steps, by identity; 1 where it has none."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(param): float(group.get("lr", 1.0)) for group in groups for param in group["params"]}


def _rates_by_name(model: nn.Module, rates: dict[int, float]) -> Iterator[tuple[str, float]]:
    units = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in rates:
            if name.endswith("_flat_param"):
                units[clean_name(name).removesuffix("_flat_param").removesuffix(".")] = rates[id(param)]
            else:
                yield clean_name(name), rates[id(param)]
    for flat in flat_params(model) if units else ():
        if flat.unit in units:
            yield flat.name, units[flat.unit]


def told_apart(before: Sequence[Local], after: Sequence[Local]) -> list[Local]:
    """Return tensors with the gradients that backward left, or the optimizer where ranks scaled them each by its own.

    An optimizer may clip: by one number, whatever part of the gradient a rank has. Every rank calls this.

    Args:
        before: This rank's tensors before the optimizer stepped.
        after: The same after it.
    """
    left = {one.name: one for one in after}
    mine = {one.name: factor for one in before if (factor := _factor(one.grad, left[one.name].grad)) is not None}
    by_name: dict[str, list[float]] = {}
    for factors in of_all_ranks(mine):
        for name, factor in factors.items():
            by_name.setdefault(name, []).append(factor)
    apart = {name for name, found in by_name.items() if max(found) - min(found) > ALIKE * max(map(abs, found))}
    return [replace(one, grad=left[one.name].grad) if one.name in apart else one for one in before]


def _factor(before: torch.Tensor | None, after: torch.Tensor | None) -> float | None:
    """Return the number by which a gradient was multiplied; None where it was not, or there is nothing to tell by."""
    if before is None or after is None or before.shape != after.shape or not before.is_floating_point():
        return None
    square = float((before * before).sum())
    factor = float((before * after).sum()) / square if square else 0.0
    allowed = 4 * torch.finfo(before.dtype).eps * abs(factor)
    exact = bool(((after - before * factor).abs() <= allowed * before.abs().max()).all()) if factor else False
    return factor if exact else None
