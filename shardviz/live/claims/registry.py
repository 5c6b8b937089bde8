"""The sources of claims, in order: the first that knows a tensor describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardviz.live.claims import deepspeed, dtensor, fsdp1, hooks, megatron, spmd, transformers, wrappers
from shardviz.live.claims.local import Local, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import ModuleType

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh
    from shardviz.live.claims.deepspeed import Fragment
    from shardviz.reference.files import Reference

SOURCES: tuple[ModuleType, ...] = (
    wrappers,
    fsdp1,
    dtensor,
    deepspeed,
    megatron,
    spmd,
    transformers,
    hooks,
)


def of_model(model: nn.Module, mesh: Mesh | None) -> Iterator[Local]:
    """Yield the tensors that only a whole model shows."""
    for find in _functions("of_model"):
        yield from find(model, mesh)


def names(model: nn.Module) -> dict[str, str]:
    """Return the unparallelized names of tensors that ranks number for themselves."""
    return {own_name: name for find in _functions("names") for own_name, name in find(model).items()}


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None = None) -> Local:
    """Return this rank's part of one tensor, with the claim of the library that split it.

    Args:
        name: Its fully qualified name.
        role: Its role.
        tensor: A plain tensor, a DTensor, or one that a library marked.
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


def gradients(model: nn.Module, stepper: object, stepped: Collection[int]) -> Iterator[Local]:
    """Yield this rank's part of the gradients of what is stepped in parameters' place.

    Args:
        model: The unwrapped model.
        stepper: The library's engine or optimizer whose step it is.
        stepped: The identities of what the inner optimizer steps now.
    """
    for find in _functions("gradients"):
        yield from find(model, stepper, stepped)


def checkpoint(model: nn.Module, reference: Reference) -> Reference:
    """Return a reference under the model's own names if a library's loader renames or merges."""
    for find in _functions("checkpoint"):
        reference = find(model, reference) or reference
    return reference


def _functions(function: str) -> Iterator[Callable[..., Any]]:
    return (getattr(source, function) for source in SOURCES if hasattr(source, function))
