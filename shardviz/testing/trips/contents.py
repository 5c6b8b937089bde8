"""This rank's tensors of a job, named by parameter, and the values that fill them.

Parameters, buffers, optimizer state and hyperparameters are filled with values that say where they belong, or with
others that must be gone after a load.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.describe import digest
from shardviz.live.capture.lookup.by_reference import claimed_region, stored_slice
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, from_bits, named_tensors, tied_names
from shardviz.live.claims.hooks import Made
from shardviz.live.claims.registry import local_tensors, of_tensor, unwrapped
from shardviz.live.compat.modules import clean_name, computed_buffers
from shardviz.stamping.fill import Fill, can_fill

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region
    from shardviz.live.claims.local import Local
    from shardviz.reference.files import Entry

NOT_SAVED = ("params", "param_names")
"""Entries of a group that are not hyperparameters."""

SAVED_FACTOR = 0.96875
"""What hyperparameters are multiplied by before a save: those that a load leaves alone differ."""

OLD_FACTOR = 0.5
SAVED_NUMBER = 1024
OLD_NUMBER = 7
"""A step and its like: before a save and before a load. Small integers are exact in every type that holds steps."""


@dataclass(frozen=True)
class StateNumber:
    """A number in an optimizer's state, such as its step: a tensor without dims, or plain.

    Attributes:
        state: The state of its parameter.
    """

    state: MutableMapping[str, Any]
    key: str

    @property
    def value(self) -> float:
        """The number."""
        return float(self.state[self.key])

    def write(self, value: float) -> None:
        """Change it, in place if it is a tensor."""
        held = self.state[self.key]
        if isinstance(held, torch.Tensor):
            held.fill_(value)
        else:
            self.state[self.key] = type(held)(value)


@dataclass(frozen=True)
class RankContents:
    """The tensors, optimizer state and hyperparameters that a rank has.

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
    numbers: dict[str, StateNumber] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    not_known: dict[str, str] = field(default_factory=dict)
    strangers: int = 0
    frozen: frozenset[str] = frozenset()


def contents_of(model: nn.Module, optimizer: Any, mesh: DeviceMesh | None) -> RankContents:
    """Return this rank's contents of a model and its optimizer.

    Args:
        model: The model, or this rank's stage of it; tensors that no checkpoint has are left out.
        optimizer: Anything with `param_groups` and `state`, or None.
    """
    inner = unwrapped(model)
    frozen = frozenset(clean_name(name) for name, one in inner.named_parameters() if not one.requires_grad)
    contents = RankContents(tied=tuple(tied_names(inner)), frozen=frozen)
    computed = computed_buffers(inner)
    plain = plain_mesh(mesh) if mesh is not None else None
    for local in local_tensors(inner, plain):
        if local.unknown:
            contents.not_known[local.name] = local.unknown
        elif local.name not in computed:
            contents.tensors[local.name] = local
    if optimizer is None:
        return contents
    owners = {id(tensor): clean_name(name) for _, name, tensor in reversed(list(named_tensors(inner)))}
    strangers = 0
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            strangers += id(parameter) not in owners
            owner = owners.get(id(parameter), f"param_groups[{number}][{index}]")
            _add_state(contents, owner, optimizer.state.get(parameter, {}), plain)
            contents.settings.update({f"{owner} {key}": value for key, value in settings_of(group)})
    return replace(contents, strangers=strangers)


def _add_state(contents: RankContents, owner: str, state: MutableMapping[str, Any], mesh: Mesh | None) -> None:
    parameter = contents.tensors.get(owner)
    for key, value in state.items():
        name = f"{owner} {key}"
        if isinstance(value, torch.Tensor) and value.dim():
            local = of_tensor(name, "optim", value, mesh)
            if local.unknown:
                contents.not_known[name] = local.unknown
                continue
            contents.tensors[name] = local.placed_as(parameter)
        elif isinstance(value, torch.Tensor | float) or type(value) is int:
            contents.numbers[name] = StateNumber(state, key)


def settings_of(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield a group's fractional hyperparameters; those in tuples singly: `betas[0]`."""
    for key, value in group.items():
        if key in NOT_SAVED:
            continue
        for index, number in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if _is_fraction(number):
                yield (f"{key}[{index}]" if isinstance(value, tuple | list) else key), float(number)


def _is_fraction(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float)


def give_state(optimizer: Any) -> None:
    """Let an optimizer without state make that of its first step. Gradients are zero, and gone."""
    if optimizer is None or len(optimizer.state):
        return
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class FilledTensor:
    """A tensor that was filled with values to send.

    Attributes:
        key: The tensor whose values it has: its own name, or the first of those that share its storage.
        ranks: The ranks that have it.
        each: Whether each rank has one of its own under this name, which no placements describe.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    key: str
    ranks: tuple[int, ...] = ()
    each: bool = False

    def entry(self, salt: str, rank: int) -> Entry | None:
        """Return its values; None for a dtype that has none to fill with."""
        key = f"{salt}/{self.key}@{rank}" if self.each else f"{salt}/{self.key}"
        return values_for(key, self.shape, self.dtype)


def values_for(key: str, shape: tuple[int, ...], dtype: str, *, old: bool = False) -> Entry | None:
    """Return values generated from a name: those to send, or the old ones to be replaced."""
    if dtype == "bool":
        return Made(dtype, shape, partial(_flags, key, shape, negated=old))
    return Fill(f"{key} as it was before" if old else key, shape, dtype) if can_fill(dtype) else None


def _flags(key: str, shape: tuple[int, ...], *, negated: bool) -> torch.Tensor:
    """Return values of a bool tensor, or the opposite: they show that it arrived, not where elements belong."""
    return torch.from_numpy(np.asarray((Fill(key, shape, "uint8").bits & np.uint8(1)) != np.uint8(negated)))


def sent_by_all(contents: RankContents) -> dict[str, FilledTensor]:
    """Describe all ranks' tensors, by name. Every rank calls this, before anything is filled.

    A plain tensor whose values differ between ranks is each rank's own; if they are equal it is a copy.
    """
    first_of = {name: group[0] for group in contents.tied for name in group}
    own_tensors = {name: _describe(local, first_of.get(name, name)) for name, local in contents.tensors.items()}
    pairs_of: dict[str, list[tuple[int, tuple[FilledTensor, str]]]] = {}
    for rank, of_rank in enumerate(of_all_ranks(own_tensors)):
        for name, pair in of_rank.items():
            pairs_of.setdefault(name, []).append((rank, pair))
    return {name: _common_tensor(pairs) for name, pairs in pairs_of.items()}


def _describe(local: Local, key: str) -> tuple[FilledTensor, str]:
    """Return a tensor, with a digest of its values if it is plain."""
    sent = FilledTensor(local.name, local.role, local.shape, dtype_name(local.values.dtype), key)
    return sent, "" if local.claim or local.flat else digest(local.values)


def _common_tensor(pairs: list[tuple[int, tuple[FilledTensor, str]]]) -> FilledTensor:
    sent = pairs[0][1][0]
    each = len({(one.shape, own) for _, (one, own) in pairs}) > 1 and all(own for _, (_, own) in pairs)
    return FilledTensor(sent.name, sent.role, sent.shape, sent.dtype, sent.key, tuple(rank for rank, _ in pairs), each)


def fill(contents: RankContents, entries: Mapping[str, Entry | None], number: float) -> dict[str, str]:
    """Fill this rank's tensors with values, and every number of the optimizer's state.

    Returns:
        The tensors that could not be written, and why.
    """
    refused = dict(contents.not_known)
    for name, local in contents.tensors.items():
        saved = entries.get(name)
        if saved is None:
            refused[name] = f"{local.values.dtype} has no values to fill it with"
        elif local.values.is_meta:
            refused[name] = "it is on the meta device"
        elif (rank_bits := stored_slice(local, saved)) is None:
            refused[name] = "its placements do not say which elements this rank has"
        else:
            bits = (
                torch.from_numpy(rank_bits != 0) if saved.dtype == "bool" else from_bits(rank_bits, local.values.dtype)
            )
            with torch.no_grad():
                local.values.copy_(bits)
    for state_number in contents.numbers.values():
        state_number.write(number)
    return refused | _not_applied(contents, entries, refused)


def _not_applied(
    contents: RankContents, entries: Mapping[str, Entry | None], refused: Mapping[str, str]
) -> dict[str, str]:
    """Return the tensors that do not read back as written: they share elements with others."""
    wrong = {}
    for name, local in contents.tensors.items():
        saved = entries.get(name)
        if saved is not None and name not in refused:
            rank_bits = stored_slice(local, saved)
            if rank_bits is None or not np.array_equal(rank_bits, bits_of_tensor(local.values)):
                wrong[name] = "it lost the values that it was filled with: it shares elements with a different tensor"
    return wrong


def region_of(local: Local) -> Region | None:
    """Return the part that this rank claims; None if that is not known."""
    shape = (int(np.prod(local.shape)),) if local.flat else local.shape
    return claimed_region(local, shape)


def old_entries(contents: RankContents, salt: str) -> dict[str, Entry | None]:
    """Return what receivers are filled with before anything is received."""
    first_of = {name: group[0] for group in contents.tied for name in group}
    return {
        name: values_for(f"{salt}/{first_of.get(name, name)}", local.shape, dtype_name(local.values.dtype), old=True)
        for name, local in contents.tensors.items()
    }


def settings_times(optimizer: Any, factor: float) -> None:
    """Multiply an optimizer's hyperparameters; zeros stay zeros."""
    for group in optimizer.param_groups if optimizer is not None else ():
        for key, value in group.items():
            if key not in NOT_SAVED and isinstance(value, tuple | list):
                group[key] = type(value)(one * factor if _is_fraction(one) else one for one in value)
            elif key not in NOT_SAVED and _is_fraction(value):
                group[key] = value * factor


def salt_of(*parts: object) -> str:
    """Return a short text that is unique to a trip, to tell its values from an earlier trip's."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()
