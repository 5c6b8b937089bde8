"""What belongs to a traced model and is not in it: what its optimizers step beside it, averages, and copies.

The first are parameters of a loss, of a second model, or of no module. The second are another module, or a dict or list
of tensors: nothing says what they are. They have the names or the order of the model's parameters and their shapes, in
memory of their own. What of it is no average, such as a teacher or gradients, is found out when two jobs are compared.
Copies of parameters are stepped by a script in their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardviz.live.claims import masters, registry
from shardviz.live.claims.registry import local_tensors, locals_of, of_tensor, unwrapped
from shardviz.live.claims.wrappers import reducing
from shardviz.live.compat.modules import clean_name
from shardviz.live.run.references.values import living_collections, living_modules, outermost
from shardviz.live.run.step_files import Step, gradients_of, sampled
from shardviz.live.step.steppers import identities, parameters_of, stepped_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.optim import Optimizer

    from shardviz.dump.records.step import WrapperRecord
    from shardviz.live.claims.local import Local


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
    """Return what optimizers that step a model's parameters step beside them."""
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


def buffers_alone(root: nn.Module) -> dict[str, nn.Module]:
    """Return modules beside a model that have buffers and no parameters, such as a loss, by the name of their class.

    Of several of one class nothing says which is which in another job.
    """
    inside = set(map(id, root.modules()))
    alone: dict[str, list[nn.Module]] = {}
    for module in living_modules():
        is_alone = id(module) not in inside and module._buffers and not any(True for _ in module.parameters())
        if is_alone and outermost(module) is module:
            alone.setdefault(type(module).__name__, []).append(module)
    return {name: modules[0] for name, modules in alone.items() if len(modules) == 1}


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


MOST = 4
"""Of so many modules or collections the numbers are kept."""

PREFIX = "module."


@dataclass(frozen=True, slots=True)
class Averages:
    """What may be averages of a model's weights.

    Attributes:
        params: This rank's part of each parameter that is trained, by name, in the model's order.
        sources: A module, or a dict or list of tensors, each with the name of the model's child that it is like; empty
            if it is like the model.
        most: Of each tensor no more elements are kept.
    """

    params: Mapping[str, Local]
    sources: tuple[tuple[Any, str], ...]
    most: int

    @classmethod
    def of(cls, model: nn.Module, most: int) -> Averages:
        """Look for averages of a model's weights among all that lives in this process."""
        trained = {clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
        params = {local.name: local for local in local_tensors(model) if local.name in trained}
        known = {local.values.data_ptr() for local in params.values()}
        copies = (each for parameter in model.parameters() for each in registry.stand_ins(parameter))
        known |= {copy.data_ptr() for copy in copies if isinstance(copy, torch.Tensor)}  # which are no averages
        candidates = (pair for pair in _candidates(model, len(params)) if _are_of(*pair, params, known))
        return cls(params, tuple(islice(candidates, MOST)) if params else (), most)

    def now(self) -> Iterator[Local]:
        """Yield what this rank has of each now."""
        for number, (source, child) in enumerate(self.sources):
            which = f"average {number + 1}" if number else "average"
            for name, local in _tensors_of(source, child, self.params).items():
                if not local.values.is_meta:
                    values = sampled(local.values.detach(), self.most)
                    placed = replace(local, values=values).placed_as(self.params[name])
                    yield replace(placed, name=f"{which} of {name}", role="buffer", grad=None)


def _candidates(model: nn.Module, num_params: int) -> Iterator[tuple[Any, str]]:
    """Yield modules with the same parts as a model, then dicts and lists of enough tensors, then copies of children.

    A teacher may have the encoder of the model that it teaches, without the head.
    """
    inside, parts = set(map(id, model.modules())), model._modules.keys()
    apart = [module for module in living_modules() if id(module) not in inside]
    for module in apart:
        if module._modules.keys() == parts and (parts or type(module) is type(model)):
            yield module, ""
    for collection in living_collections():
        tensors = collection if isinstance(collection, list) else collection.values()
        if len(collection) >= num_params and isinstance(next(iter(tensors), None), torch.Tensor):
            yield collection, ""
    for name, child in model.named_children():
        alike = (module for module in apart if type(module) is type(child) and child._modules)
        yield from ((module, name) for module in alike if module._modules.keys() == child._modules.keys())


def _are_of(source: Any, child: str, params: Mapping[str, Local], known: set[int]) -> bool:
    """Whether tensors are as parameters, and in memory of their own, which is known from then on."""
    tensors = _tensors_of(source, child, params)
    if not tensors or tensors.keys() != {name for name in params if not child or name.startswith(f"{child}.")}:
        return False
    memory = {local.values.data_ptr() for local in tensors.values() if local.values.numel()}
    is_new = known.isdisjoint(memory)
    known |= memory
    return is_new


def _tensors_of(source: Any, child: str, params: Mapping[str, Local]) -> dict[str, Local]:
    """Return what a source has of each parameter that is as large as that, in all or on this rank."""
    named = ((f"{child}.{name}" if child else name, local) for name, local in _named(source, params))
    return {
        name: local
        for name, local in named
        if name in params
        and local.values.is_floating_point()
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


LISTS = nn.ParameterList, nn.ParameterDict
NOT_RECOGNIZED = "the gradient: if a copy of the weight is stepped, its values and its shape don't say so"
WITHOUT_GRADIENT = (
    "the gradient: the copy of the weight that is stepped has none as the first optimizer steps, or lies in a row that "
    "only some of the ranks divide among them"
)


def find_copies(root: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Find copies of a model's parameters among what optimizers step that steps none of them.

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
    stepped = {identity for optimizer in optimizers for identity in stepped_by(optimizer)}
    gradients = {local.name: local for local in masters.gradients(locals_of(model), None, stepped)}
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
