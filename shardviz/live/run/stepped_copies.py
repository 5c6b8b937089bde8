"""Copies of a model's parameters that a script steps in their place: which they are, and what is recorded of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from shardviz.live.capture.locals import Local, local_tensors, unwrapped
from shardviz.live.claims import masters, registry
from shardviz.live.run.references.values import living_modules
from shardviz.live.run.step_files import Step, gradients_of, sampled
from shardviz.live.step.steppers import identities, parameters_of, stepped_by

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch.optim import Optimizer

LISTS = nn.ParameterList, nn.ParameterDict
NOT_RECOGNIZED = "the gradient: if a copy of the weight is stepped, its values and its shape don't say so"
WITHOUT_GRADIENT = (
    "the gradient: the copy of the weight that is stepped has none as the first optimizer steps, or lies in a row that "
    "only some of the ranks divide among them"
)


def find_copies(root: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Find copies of a model's parameters among what optimizers step that steps none of them.

    Args:
        root: The model as the job calls it.
        optimizers: The job's.

    Returns:
        Whether there are any.
    """
    known = identities(root.parameters())
    stepped = {id(tensor): tensor for optimizer in optimizers for tensor in parameters_of(optimizer)}
    by_optimizers = {identity for optimizer in optimizers for identity in stepped_by(optimizer)}
    left = [
        parameter
        for _, parameter in registry.named_parameters(unwrapped(root))
        if parameter.requires_grad and not parameter.is_meta and identities([parameter]).isdisjoint(by_optimizers)
    ]
    loose = {identity: tensor for identity, tensor in stepped.items() if identity not in known}
    if not left or not loose:
        return False
    dtypes = {parameter.dtype for parameter in left}
    for module in living_modules():
        if not isinstance(module, LISTS):  # a module of the same dtype may be called, too
            for own in module.parameters(recurse=False):
                if own.dtype in dtypes:
                    loose.pop(id(own), None)
    return bool(loose) and masters.link(left, list(loose.values()))


def has_copies(root: nn.Module) -> bool:
    """Whether copies of some of a model's parameters are stepped in their place."""
    return masters.has_copies(list(root.parameters()))


def has_copies_in(root: nn.Module, module: nn.Module) -> bool:
    """Whether a module has what is stepped in place of a model's parameters, so that it's no copy if it is called."""
    copies = {id(copy) for parameter in root.parameters() for copy in masters.stand_ins(parameter)}
    return any(id(parameter) in copies for parameter in module.parameters())


def forget_copies(root: nn.Module) -> None:
    """Take nothing for a copy of a model's parameters any more."""
    masters.forget(root.parameters())


def gradients_with_copies(step: Step, optimizers: Iterable[Optimizer]) -> list[Local] | None:
    """Return copies of this rank's part of gradients; None if no copies are stepped.

    What a parameter has in `.grad` may be reduced or divided yet, so that its copy's gradient counts. A parameter
    without a copy here may have one on another rank. What isn't known is added to the step.
    """
    model = unwrapped(step.root)
    parameters = list(registry.named_parameters(model))
    if not masters.has_copies([parameter for _, parameter in parameters]):
        return None
    locals_ = {local.name: local for local in local_tensors(model)}
    weights: dict[torch.Tensor, Local] = {parameter: locals_[name] for name, parameter in parameters if name in locals_}
    stepped = {identity for optimizer in optimizers for identity in stepped_by(optimizer)}
    gradients = {local.name: local for local in masters.gradients(weights, None, stepped)}
    step.copied.update(
        {name: is_stale for name, param in parameters if (is_stale := masters.is_stale(param)) is not None}
    )
    for name, parameter in parameters:
        if name not in gradients and list(masters.stand_ins(parameter)):
            step.unknown[name] = WITHOUT_GRADIENT
        elif masters.unknown(parameter):
            step.unknown[name] = NOT_RECOGNIZED
    direct = {name for name, parameter in parameters if id(parameter) not in stepped and parameter.requires_grad}
    own = [replace(local, values=sampled(local.values.detach(), step.most)) for local in gradients.values()]
    return [*own, *gradients_of(step, direct)]
