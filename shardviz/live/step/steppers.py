"""Which parameters of a model an optimizer steps: themselves, views of them, or a library's copies in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.live.claims import registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import nn


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what an optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]


def stepped_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the identities of what an optimizer steps, of what that is a view of, and of the optimizer."""
    tensors = list(parameters_of(optimizer))
    return {id(optimizer), *map(id, tensors), *(id(tensor._base) for tensor in tensors if tensor._base is not None)}


def identities(parameters: Iterable[torch.Tensor]) -> set[int]:
    """Return the identities of parameters, and of what an optimizer steps in their place."""
    return {id(one) for parameter in parameters for one in (parameter, *registry.stand_ins(parameter))}


def steps(optimizer: torch.optim.Optimizer, root: nn.Module) -> bool:
    """Whether an optimizer steps parameters of a model."""
    return not identities(root.parameters()).isdisjoint(stepped_by(optimizer))


def names_by_id(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of parameters by the identity of what an optimizer steps: a flat buffer has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in registry.named_parameters(model):
        for identity in identities([parameter]):
            names.setdefault(identity, []).append(name)
    return names


def names_of_stand_ins(model: nn.Module) -> set[str]:
    """Return the names of parameters in whose place an optimizer steps something else, which has their gradients."""
    return {name for name, parameter in registry.named_parameters(model) if list(registry.stand_ins(parameter))}
