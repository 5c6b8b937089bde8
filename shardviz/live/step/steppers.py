"""Which parameters of a model an optimizer steps, or what in their place; and what it keeps besides arrays.

Arrays are recorded and compared by `check`. The rest is compared here with what the unsharded model's optimizer keeps.
A difference is not a finding: nothing says how ranks should share a number that an optimizer keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardviz.dump.records.step import STATES, STEPS, OptionsRecord
from shardviz.groups import in_groups
from shardviz.live.claims import registry
from shardviz.live.compat.modules import clean_name
from shardviz.live.step.return_values import Returned, numbers_of
from shardviz.relate.tolerance import SINGLE
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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


Kept = dict[str, dict[str, torch.Tensor]]
"""Values by what they are (`step`, `hist[0]`), and by the name of their parameter, which is empty for a group's."""

Options = dict[str, dict[str, str]]
"""For each parameter the numbers among the options of its group, as text."""

MAX_LISTED = 4


def kept_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> Kept:
    """Return what an optimizer keeps that is not recorded as a tensor."""
    inner = getattr(optimizer, "optim", optimizer)
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    states: Kept = {}
    for key, state in inner.state.items():
        is_of_tensor = isinstance(state, dict) and torch.is_tensor(key)
        for kind, value in state.items() if is_of_tensor else ((key, state),):
            if not (is_of_tensor and torch.is_tensor(value) and value.ndim):
                _add(states, str(kind), names.get(id(key), ""), value)
    groups = getattr(inner, "param_groups", ())
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key != "params" and not isinstance(value, bool):
                _add(states, f"{key} of group {number} of {len(groups)}", "", value)
    return states


def options_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Options:
    """Return the options with which an optimizer steps each parameter.

    ZeroRedundancyOptimizer gives the one inside of it the numbers of its own groups only when it steps.
    """
    names = names_by_id(model)
    options: Options = {}
    outer = optimizer if hasattr(optimizer, "param_groups") else getattr(optimizer, "optim", optimizer)
    for group in getattr(outer, "param_groups", ()):
        values = {key: text for key, value in group.items() if key != "params" and (text := _option(value))}
        options |= {name: values for param in group["params"] for name in names.get(id(param), ())}
    return options


def states_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Options:
    """Return which kinds of tensors an optimizer keeps of each parameter, and how often it stepped that.

    Before its first step it keeps nothing.
    """
    names = names_by_id(model)
    states: Options = {}
    for parameter, state in getattr(optimizer, "optim", optimizer).state.items():
        if id(parameter) in names and isinstance(state, dict):
            kinds = sorted(str(kind) for kind, value in state.items() if torch.is_tensor(value) and value.ndim)
            steps = _option(state["step"]) if "step" in state else ""
            kept = {STATES: ", ".join(kinds), STEPS: steps}
            texts = {key: text for key, text in kept.items() if text}
            states |= dict.fromkeys(names[id(parameter)], texts)
    return states


def options_records(options: Options) -> list[OptionsRecord]:
    """Return options for a rank's record, parameters with equal ones together."""
    names = in_groups((tuple(values.items()), name) for name, values in options.items())
    return [OptionsRecord(values, tuple(of_values)) for values, of_values in names.items()]


def _option(value: object) -> str:
    """Write a number, or several; empty for anything else, such as which kernels are used."""
    if isinstance(value, bool) or not isinstance(value, int | float | tuple | list | torch.Tensor):
        return ""
    if isinstance(value, tuple | list):
        texts = [_option(item) for item in value]
        return f"({', '.join(texts)})" if all(texts) else ""
    return f"{float(value):.6g}" if not torch.is_tensor(value) or value.numel() == 1 else ""


def other_options(sharded: Options, unsharded: Options) -> list[tuple[str, str, str, str]]:
    """Return parameters that are stepped with another option: `(parameter, option, value, the unsharded one's)`."""
    return [
        (name, option, value, reference[option])
        for name, options in sharded.items()
        if (reference := unsharded.get(name)) is not None
        for option, value in options.items()
        if option in reference and reference[option] != value
    ]


def _add(states: Kept, kind: str, name: str, value: object) -> None:
    for path, tensor in Returned.of(value).tensors.items():
        numbers = numbers_of(tensor)
        if numbers is not None:
            states.setdefault(kind + path, {})[name] = numbers.cpu()


def differing(sharded: Kept, unsharded: Kept) -> Iterator[tuple[str, str]]:
    """Yield what both optimizers keep with different values, each with the reason why it is not checked."""
    for kind, of_params in sharded.items():
        reference = unsharded.get(kind)
        odd = [name for name, value in of_params.items() if reference and not _is_kept(name, value, reference)]
        if odd:
            of_names = f" of {listed(odd, MAX_LISTED)}" if any(odd) else ""
            why = "after the step it differs from the unsharded model's, and nothing says how ranks share it"
            yield kind, f"the optimizer's {kind}{of_names}: {why}"


def _is_kept(name: str, value: torch.Tensor, reference: Mapping[str, torch.Tensor]) -> bool:
    """Whether the unsharded model's optimizer keeps a value for a parameter, or for any if it has no such name."""
    candidates = [reference[name]] if name in reference else list(reference.values())
    return any(one.shape == value.shape and _is_near(one, value) for one in candidates)


def _is_near(candidate: torch.Tensor, value: torch.Tensor) -> bool:
    finite = [side[torch.isfinite(side)].abs() for side in (candidate.double(), value.double())]
    largest = max((float(side.max()) for side in finite if side.numel()), default=0.0)
    return bool(torch.allclose(candidate.double(), value.double(), rtol=0.0, atol=SINGLE * largest, equal_nan=True))
