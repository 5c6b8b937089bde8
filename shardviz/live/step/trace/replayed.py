"""What the gradients of a module's weights should be, by what the sharded step itself put in and what came back to it.

In narrow numbers two right steps drift apart from layer to layer, so that a gradient that is off by a hundredth does
not show beside the unsharded model's. It does beside this: the unsharded module, run in float64 on what all ranks
together gave the sharded one, and on the gradient that came back. Only the rounding of the gradient itself is left.

Modules without modules in them that are called once are run again, where that makes the unsharded step's own gradients.
"""

from __future__ import annotations

from copy import deepcopy
from pickle import PicklingError
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardviz.layout.layout import Layout
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.compat import clean_name
from shardviz.live.step.trace.fitting import part_of
from shardviz.live.step.trace.joined import Place
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import LEAST_FACTOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from shardviz.live.capture.locals import Local
    from shardviz.live.step.trace.judged import Judged
    from shardviz.live.step.unsharded.step import UnshardedStep

MAX_EXCHANGED = 1 << 21
"""Ranks exchange no more elements of inputs and gradients than this."""


class Sides(NamedTuple):
    """What goes into a module in forward and comes back to it in backward."""

    given: torch.Tensor
    back: torch.Tensor


def replayed(judged: Judged, reference: UnshardedStep) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients, by weight, that the sharded step's own activations make. Every rank calls this."""
    names = dict(_leaves(reference.model))
    wanted = [name for name in names if reference.points.counts.get(name) == 1]
    wholes = _wholes(judged, [place for name in wanted for place in _places(name)])
    weights = {local.name: local for local in reference.before if local.role == "param"}
    for name in wanted:
        given, back = (wholes.get(place) for place in _places(name))
        points = [reference.points.points.get(place) for place in _places(name)]
        own = [point.values for point in points if point is not None and point.values is not None]
        if given is not None and back is not None and len(own) == 2:
            yield from _of_module(name, names[name], weights, Sides(given, back), Sides(own[0], own[1]))


def _places(name: str) -> tuple[Place, Place]:
    return Place(name, 0, "input", 0), Place(name, 0, "gradient of output", 0)


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name and not any(True for _ in module.children()) and any(True for _ in module.parameters()):
            yield clean_name(name), module


def _wholes(judged: Judged, places: Sequence[Place]) -> dict[Place, torch.Tensor]:
    """Return what all ranks have together at places at which each has a part of the whole. Every rank calls this."""
    sent: dict[Place, torch.Tensor] = {}
    left = MAX_EXCHANGED
    for place in places:
        values = judged.points[place].values if place in judged.points else None
        if values is not None and place in judged.layouts and values.numel() <= left and judged.state(place) == "right":
            sent[place] = (values / judged.scale(place, judged.rank)).cpu()
            left -= values.numel()
    of_all = of_all_ranks(sent)
    wholes = {}
    for place in places:
        parts = {rank: own[place] for rank, own in enumerate(of_all) if place in own}
        whole = judged.reference.points[place].values if place in judged.reference.points else None
        if whole is not None and parts and place in judged.layouts:
            joined = _joined(judged, place, tuple(whole.shape), parts)
            if joined is not None:
                wholes[place] = joined
    return wholes


def _joined(
    judged: Judged, place: Place, shape: tuple[int, ...], parts: Mapping[int, torch.Tensor]
) -> torch.Tensor | None:
    whole = torch.full(shape, float("nan"), dtype=torch.float64)
    layout = Layout.from_placements(judged.mesh, shape, judged.layouts[place])
    for rank, values in parts.items():
        region = layout.region(judged.mesh.coord_of(rank))
        if region.shape != tuple(values.shape):
            return None
        if all(len(spans) == 1 for spans in region.dims):
            part_of(whole, region).copy_(values)
        else:
            whole.view(-1)[torch.from_numpy(region.flat_ids(shape))] = values.double()
    return None if bool(whole.isnan().any()) else whole


def _of_module(
    name: str, module: nn.Module, weights: Mapping[str, Local], sharded: Sides, unsharded: Sides
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's gradients, those apart that the unsharded step has not got from its own activations either."""
    own = _gradients(name, module, weights, unsharded)
    due = _gradients(name, module, weights, sharded) if own else {}
    for weight, gradient in own.items():
        local = dict(module.named_parameters())[weight.removeprefix(f"{name}.")].grad
        if local is not None and weight in due and abs(_factor(local, gradient) - 1) <= LEAST_FACTOR:
            yield weight, due[weight]


def _gradients(name: str, module: nn.Module, weights: Mapping[str, Local], sides: Sides) -> dict[str, torch.Tensor]:
    """Run a module in float64, with its weights before the step; return nothing if that cannot be done."""
    if any(f"{name}.{own}" not in weights for own, _ in module.named_parameters()):
        return {}
    try:
        again = deepcopy(module).cpu().double()
    except (TypeError, RuntimeError, PicklingError):  # it has something that cannot be copied
        return {}
    with torch.no_grad():
        for own, parameter in again.named_parameters():
            parameter.copy_(weights[f"{name}.{own}"].values)
            parameter.grad = None
    if not _runs_back(again, sides):
        return {}
    found = {f"{name}.{own}": one.grad for own, one in again.named_parameters() if one.grad is not None}
    return {weight: gradient for weight, gradient in found.items() if bool(gradient.isfinite().all())}


def _runs_back(module: nn.Module, sides: Sides) -> bool:
    """Run a module forward and backward; whether it could be run by its first input alone."""
    try:
        output = module(sides.given.cpu().double())
        if torch.is_tensor(output) and output.shape == sides.back.shape:
            torch.autograd.backward(output, sides.back.cpu().double())
            return True
    except Exception:  # a module of a user's own may raise anything where it is called otherwise than by its model
        return False
    return False


def _factor(values: torch.Tensor, due: torch.Tensor) -> float:
    """Return the number by which what is due comes nearest to values; infinite if nothing is due."""
    factor = factor_of(values.detach().double().cpu().numpy(), due.double().cpu().numpy())
    return float("inf") if factor is None else factor
