"""Averages of a traced model's weights that a job keeps: another module, or a dict or list of tensors.

Nothing says what they are. They have the names or the order of the model's parameters and their shapes, in memory of
their own. What of it is no average, such as a teacher or gradients, is found out when two jobs are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from shardviz.live.capture.locals import Local, local_tensors, of_tensor
from shardviz.live.compat import clean_name
from shardviz.live.run.references.values import living_collections, living_modules
from shardviz.live.run.step_files import sampled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

MOST = 4
"""Of so many modules or collections the numbers are kept."""

PREFIX = "module."


@dataclass(frozen=True, slots=True)
class Averages:
    """What may be averages of a model's weights.

    Attributes:
        params: This rank's part of each parameter that is trained, by name, in the model's order.
        sources: A module, or a dict or list of tensors.
        most: Of each tensor no more elements are kept.
    """

    params: Mapping[str, Local]
    sources: tuple[Any, ...]
    most: int

    @classmethod
    def of(cls, model: nn.Module, most: int) -> Averages:
        """Look for averages of a model's weights among all that lives in this process."""
        trained = {clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
        params = {local.name: local for local in local_tensors(model) if local.name in trained}
        known = {local.values.data_ptr() for local in params.values()}
        candidates = (tensors for tensors in _candidates(model, len(params)) if _are_of(tensors, params, known))
        return cls(params, tuple(islice(candidates, MOST)) if params else (), most)

    def now(self) -> Iterator[Local]:
        """Yield what this rank has of each now."""
        for number, source in enumerate(self.sources):
            which = f"average {number + 1}" if number else "average"
            for name, local in _tensors_of(source, self.params).items():
                if not local.values.is_meta:
                    values = sampled(local.values.detach(), self.most)
                    placed = replace(local, values=values).placed_as(self.params[name])
                    yield replace(placed, name=f"{which} of {name}", role="buffer", grad=None)


def _candidates(model: nn.Module, num_params: int) -> Iterator[Any]:
    """Yield modules with the same parts as a model, then dicts and lists of enough tensors."""
    inside, parts = set(map(id, model.modules())), model._modules.keys()
    alike = (module for module in living_modules() if module._modules.keys() == parts)
    yield from (module for module in alike if id(module) not in inside and (parts or type(module) is type(model)))
    for collection in living_collections():
        tensors = collection if isinstance(collection, list) else collection.values()
        if len(collection) >= num_params and isinstance(next(iter(tensors), None), torch.Tensor):
            yield collection


def _are_of(source: Any, params: Mapping[str, Local], known: set[int]) -> bool:
    """Whether tensors are as parameters, and in memory of their own, which is known from then on."""
    tensors = _tensors_of(source, params)
    if tensors.keys() != params.keys():
        return False
    memory = {local.values.data_ptr() for local in tensors.values() if local.values.numel()}
    is_new = known.isdisjoint(memory)
    known |= memory
    return is_new


def _tensors_of(source: Any, params: Mapping[str, Local]) -> dict[str, Local]:
    """Return what a source has of each parameter that is as large as that, in all or on this rank."""
    tensors = {name: local for name, local in _named(source, params) if name in params}
    return {
        name: local
        for name, local in tensors.items()
        if local.values.is_floating_point()
        and (local.values.shape == params[name].values.shape or local.shape == params[name].shape)
    }


def _named(source: Any, params: Iterable[str]) -> Iterator[tuple[str, Local]]:
    if isinstance(source, torch.nn.Module):
        yield from ((local.name, local) for local in local_tensors(source))
        return
    named = zip(params, source, strict=False) if isinstance(source, list) else source.items()
    for name, tensor in list(named):
        if isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            cleaned = clean_name(name).removeprefix(PREFIX)
            yield cleaned, of_tensor(cleaned, "buffer", tensor.detach())
