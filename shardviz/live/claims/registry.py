"""A model's tensors on this rank, plain and detached, each with its claim by the first source that knows the tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel

from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims import deepspeed, hooks, masters, megatron, pytorch, spmd, transformers, wrappers
from shardviz.live.claims.local import Local, plain
from shardviz.live.compat.fsdp import held_back
from shardviz.live.compat.modules import clean_name, unit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from types import ModuleType

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh
    from shardviz.live.claims.deepspeed import Fragment
    from shardviz.reference.files import Reference


SOURCES: tuple[ModuleType, ...] = (wrappers, pytorch, deepspeed, megatron, masters, spmd, transformers, hooks)


def of_model(model: nn.Module, mesh: Mesh | None) -> Iterator[Local]:
    """Yield the tensors that only a whole model shows."""
    for find in _functions("of_model"):
        yield from find(model, mesh)


def module_names(model: nn.Module) -> dict[str, str]:
    """Return the unparallelized names of modules that ranks number for themselves, and of those in them."""
    numbers = {name: number for find in _functions("numbers") for name, number in find(model).items()}
    names: dict[str, str] = {}
    for name, _ in model.named_modules() if numbers else ():
        parent, _, last = name.rpartition(".")
        last = numbers.get(name, last)
        names[name] = f"{names[parent]}.{last}" if parent else last
    return {clean_name(own_name): clean_name(name) for own_name, name in names.items() if own_name != name}


def names(model: nn.Module) -> dict[str, str]:
    """Return the unparallelized names of tensors that ranks number for themselves."""
    of_modules = module_names(model)
    names: dict[str, str] = {}
    for _, called, _ in named_tensors(model) if of_modules else ():
        module, _, last = clean_name(called).rpartition(".")
        if module in of_modules:
            names[f"{module}.{last}"] = f"{of_modules[module]}.{last}"
    return names


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a model's parameters with their unparallelized names."""
    of_tensors = names(model)
    for called, parameter in model.named_parameters():
        name = clean_name(called)
        yield of_tensors.get(name, name), parameter


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None = None) -> Local:
    """Return this rank's part of one tensor, with the claim of the library that split it.

    Args:
        mesh: The run's mesh, whose axes give a library's groups their names.
    """
    locals_found = (find(name, role, tensor, mesh) for find in _functions("of_tensor"))
    return next((local for local in locals_found if local is not None), None) or plain(name, role, tensor)


def marks(tensor: torch.Tensor) -> bool:
    """Whether a library split a tensor: a model may be born split, without a visible call."""
    return any(marked(tensor) for marked in _functions("marks"))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside engines and wrappers, which add to every name."""
    inside: nn.Module | None = model
    while inside is not None:
        model = inside
        inner_models = (find(model) for find in _functions("inner"))
        inside = next((inner_model for inner_model in inner_models if inner_model is not None), None)
    return model


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the largest mesh that a source has for a model as torch's object."""
    meshes = (find(model) for find in _functions("mesh_of"))
    return max((mesh for mesh in meshes if mesh is not None), key=lambda mesh: (mesh.size(), mesh.ndim), default=None)


def groups_of(model: nn.Module) -> dict[str, Any]:
    """Return the process groups along mesh axes, from the source that has the most axes.

    DistributedDataParallel around a library's layers has its own axis alone.
    """
    return max((find(model) for find in _functions("groups_of")), key=len, default={})


def fragments(engine: nn.Module) -> list[Fragment]:
    """Return this rank's fragments of master copies and moments, from the first such source.

    Args:
        engine: The model as the job calls it: an engine has the optimizer.
    """
    model = unwrapped(engine)
    return next(filter(None, (list(find(engine, model)) for find in _functions("fragments"))), [])


def stand_ins(parameter: torch.Tensor) -> Iterator[object]:
    """Yield what a library lets an optimizer step in a parameter's place, or the optimizer if this changes."""
    for find in _functions("stand_ins"):
        yield from find(parameter)


def gradients(weights: Mapping[torch.Tensor, Local], stepper: object, stepped: Collection[int]) -> Iterator[Local]:
    """Yield this rank's part of the gradients of what is stepped in parameters' place.

    Args:
        stepper: The library's engine or optimizer whose step it is.
        stepped: The identities of what the inner optimizer steps now.
    """
    for find in _functions("gradients"):
        yield from find(weights, stepper, stepped)


def checkpoint(model: nn.Module, reference: Reference) -> Reference:
    """Return a reference under the model's own names if a library's loader renames or merges."""
    for find in _functions("checkpoint"):
        reference = find(model, reference) or reference
    return reference


def local_tensors(model: nn.Module, mesh: Mesh | None = None) -> Iterator[Local]:
    """Yield a model's parameters and buffers, as described by the library that split each.

    Args:
        mesh: The run's mesh, whose axes give the libraries' groups their names.
    """
    done, names_of = set(), names(model)
    for local in of_model(model, mesh):
        done.add(local.name)
        yield replace(local, name=names_of.get(local.name, local.name))
    for role, name, tensor in named_tensors(model):
        cleaned = clean_name(name)
        if cleaned not in done and unit_of(name) is None:
            yield of_tensor(names_of.get(cleaned, cleaned), role, tensor, mesh)


def locals_of(model: nn.Module) -> dict[torch.Tensor, Local]:
    """Return this rank's part of a model's parameters, by the parameter."""
    by_name = {local.name: local for local in local_tensors(model)}
    return {parameter: by_name[name] for name, parameter in named_parameters(model) if name in by_name}


def held_back_names(model: nn.Module) -> list[str]:
    """Return the names of parameters whose gradient FSDP2 keeps for a later backward."""
    without = {id(param) for param in held_back(model)}
    return [clean_name(name) for name, param in model.named_parameters() if id(param) in without]


def name_of(root: nn.Module) -> str:
    """Return the name of a model's class as its author wrote it."""
    return class_of(unwrapped(root)).__name__


def class_of(module: nn.Module) -> type:
    """Return a module's class as its author wrote it.

    `fully_shard` derives a class of its own from it, `(FSDPModule, cls)` in torch 2.6.0 to 2.15.0.
    """
    kind = type(module.module if isinstance(module, FullyShardedDataParallel) else module)
    bases = kind.__bases__
    return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else kind


def _functions(function: str) -> Iterator[Callable[..., Any]]:
    return (getattr(source, function) for source in SOURCES if hasattr(source, function))
