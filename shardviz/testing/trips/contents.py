"""What this rank has of a job: parameters, buffers, optimizer state and hyperparameters, all named by parameter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.live.capture.locals import local_tensors, of_tensor, unwrapped
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import named_tensors, tied_names
from shardviz.live.compat import clean_name, computed_buffers

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.locals import Local

NOT_SAVED = ("params", "param_names")
"""Entries of a group that are not hyperparameters."""


@dataclass(frozen=True)
class Number:
    """A number in an optimizer's state, such as its step: a tensor without dims, or plain.

    Attributes:
        state: The state of its parameter.
        key: Its name there.
    """

    state: MutableMapping[str, Any]
    key: str

    @property
    def value(self) -> float:
        """The number."""
        return float(self.state[self.key])

    def write(self, value: float) -> None:
        """Change it, in place where it is a tensor."""
        held = self.state[self.key]
        if isinstance(held, torch.Tensor):
            held.fill_(value)
        else:
            self.state[self.key] = type(held)(value)


@dataclass(frozen=True)
class Contents:
    """What a rank has.

    Attributes:
        tensors: Parameters and persistent buffers by name, optimizer state as `up.weight exp_avg`.
        numbers: Numbers of the optimizer's state, as `up.weight step`.
        settings: Hyperparameters of each parameter, as `up.weight lr`.
        tied: Groups of names that share storage.
        not_known: Tensors that are not understood, and why.
        strangers: How many tensors the optimizer steps that are not the model's.
        frozen: The parameters that are not trained.
    """

    tensors: dict[str, Local] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    not_known: dict[str, str] = field(default_factory=dict)
    strangers: int = 0
    frozen: frozenset[str] = frozenset()


def contents_of(model: nn.Module, optimizer: Any, mesh: DeviceMesh | None) -> Contents:
    """Return what this rank has of a model and its optimizer.

    Args:
        model: The model, or this rank's stage of it; tensors that no checkpoint has are left out.
        optimizer: Anything with `param_groups` and `state`, or None.
        mesh: The mesh of the job, if there is one.
    """
    inner = unwrapped(model)
    frozen = frozenset(clean_name(name) for name, one in inner.named_parameters() if not one.requires_grad)
    seen = Contents(tied=tuple(tied_names(inner)), frozen=frozen)
    computed = computed_buffers(inner)
    plain = plain_mesh(mesh) if mesh is not None else None
    for local in local_tensors(inner, plain):
        if local.unknown:
            seen.not_known[local.name] = local.unknown
        elif local.name not in computed:
            seen.tensors[local.name] = local
    if optimizer is None:
        return seen
    owners = {id(tensor): clean_name(name) for _, name, tensor in reversed(list(named_tensors(inner)))}
    strangers = 0
    for owner, parameter, group in _stepped(optimizer, owners):
        strangers += id(parameter) not in owners
        _add_state(seen, owner, optimizer.state.get(parameter, {}), plain)
        seen.settings.update({f"{owner} {key}": value for key, value in settings_of(group)})
    return replace(seen, strangers=strangers)


def _stepped(optimizer: Any, owners: dict[int, str]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield every parameter that an optimizer steps with its name, or its place where it is not the model's."""
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield owners.get(id(parameter), f"param_groups[{number}][{index}]"), parameter, group


def _add_state(seen: Contents, owner: str, state: MutableMapping[str, Any], mesh: Mesh | None) -> None:
    parameter = seen.tensors.get(owner)
    for key, value in state.items():
        name = f"{owner} {key}"
        if isinstance(value, torch.Tensor) and value.dim():
            local = of_tensor(name, "optim", value, mesh)
            if local.unknown:
                seen.not_known[name] = local.unknown
                continue
            seen.tensors[name] = _claiming_as(local, parameter)
        elif isinstance(value, torch.Tensor | float) or type(value) is int:
            seen.numbers[name] = Number(state, key)


def _claiming_as(state: Local, parameter: Local | None) -> Local:
    """Give a state without placements those of the parameter whose elements it has, one for each."""
    if parameter is None or state.claim or state.flat or state.values.shape != parameter.values.shape:
        return state
    return replace(state, shape=parameter.shape, claim=parameter.claim, flat=parameter.flat)


def settings_of(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the hyperparameters of a group that are fractions; those in tuples one by one: `betas[0]`."""
    for key, value in group.items():
        if key in NOT_SAVED:
            continue
        for index, one in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if _is_fraction(one):
                yield (f"{key}[{index}]" if isinstance(value, tuple | list) else key), float(one)


def with_settings(group: dict[str, Any], factor: float) -> None:
    """Multiply the hyperparameters of a group; zeros, which may switch something off, stay zeros."""
    for key, value in group.items():
        if key in NOT_SAVED:
            continue
        if isinstance(value, tuple | list):
            group[key] = type(value)(_times(one, factor) for one in value)
        elif _is_fraction(value):
            group[key] = _times(value, factor)


def _is_fraction(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float)


def _times(value: Any, factor: float) -> Any:
    return value * factor if _is_fraction(value) else value
