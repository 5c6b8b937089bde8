"""What an optimizer steps beside the model: parameters of a loss, a second model, one that no module has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.live.capture.locals import Local, local_tensors, of_tensor, unwrapped
from shardviz.live.claims.wrappers import reducing
from shardviz.live.run.references.values import living_modules, outermost
from shardviz.live.step.steppers import identities, stepped_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from shardviz.dump.records.step import WrapperRecord


@dataclass(frozen=True, slots=True)
class Outside:
    """Parameters that are stepped with a model's and that are not in it.

    Attributes:
        modules: Modules that have some, in any wrapper, by the name that stands before their parameters'.
        loose: Parameters that no module has, by their place in the optimizer.
    """

    modules: dict[str, nn.Module]
    loose: dict[str, torch.Tensor]

    def tensors(self) -> Iterator[Local]:
        """Yield this rank's part of each."""
        for name, module in self.modules.items():
            for local in local_tensors(unwrapped(module)):
                yield replace(local, name=f"{name}.{local.name}")
        for name, tensor in self.loose.items():
            yield of_tensor(name, "param", tensor)

    def wrappers(self) -> Iterator[WrapperRecord]:
        """Yield the wrappers that reduce gradients of these modules."""
        for name, module in self.modules.items():
            yield from reducing(module, f"{name}.")


def outside(root: nn.Module, optimizers: Iterable[Optimizer]) -> Outside:
    """Return what optimizers that step a model's parameters step beside them.

    Args:
        root: The model as the job calls it.
        optimizers: The job's.
    """
    trainable = {id(parameter) for parameter in root.parameters() if parameter.requires_grad}
    by_optimizer = [dict(_parameters(optimizer)) for optimizer in optimizers]
    stepped: dict[str, torch.Tensor] = {}
    known = identities(root.parameters())
    for parameters in by_optimizer:
        if any(id(parameter) in known and parameter.requires_grad for parameter in parameters.values()):
            stepped |= parameters
    unknown = {name: parameter for name, parameter in stepped.items() if id(parameter) not in known}
    outsiders = Outside(*_by_module(unknown)) if unknown else Outside({}, {})
    # An optimizer that lacks some of the model's parameters may have copies of them instead, in more bits.
    has_all = trainable <= {id(parameter) for parameter in stepped.values()}
    return outsiders if has_all else replace(outsiders, loose={})


def apart_from(root: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, str]]:
    """Yield modules with gradients that an optimizer steps which steps nothing of a model, with its class."""
    known = identities(root.parameters())
    for optimizer in optimizers:
        parameters = dict(_parameters(optimizer))
        has_none = known.isdisjoint(stepped_by(optimizer))
        if has_none and any(parameter.grad is not None for parameter in parameters.values()):
            for name in _by_module(parameters)[0]:
                yield name, type(optimizer).__name__


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"{type(optimizer).__name__}.param_groups.{number}.params.{index}", parameter


def _by_module(parameters: dict[str, torch.Tensor]) -> tuple[dict[str, nn.Module], dict[str, torch.Tensor]]:
    """Return the largest modules that have some of the parameters, and the parameters that none has."""
    owners = {id(own): module for module in living_modules() for own in module.parameters(recurse=False)}
    modules: dict[str, nn.Module] = {}
    loose: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for name, parameter in parameters.items():
        if id(parameter) not in owners:
            loose[name] = parameter
        elif id(parameter) not in known:
            module = outermost(owners[id(parameter)])
            modules[_free_name(type(unwrapped(module)).__name__, modules)] = module
            known |= {id(own) for own in module.parameters()}
    return modules, loose


def _free_name(name: str, taken: Iterable[str]) -> str:
    number, free = 1, name
    while free in taken:
        number, free = number + 1, f"{name}_{number + 1}"
    return free
