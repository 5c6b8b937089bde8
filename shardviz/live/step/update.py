"""The probe's own optimizer, stepped for both models, and what it makes of weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardviz.dump.records.step import RaisedRecord
from shardviz.errors import ProbeError
from shardviz.groups import in_groups
from shardviz.live.capture.agreement import attempted, of_all_ranks
from shardviz.live.claims.registry import local_tensors, unwrapped
from shardviz.live.compat.fsdp import flat_params, writes_to_gathered
from shardviz.live.compat.modules import clean_name, unit_of
from shardviz.live.compat.worlds import mesh_of_one_rank, one_process
from shardviz.live.step.observe import adam_states, optimizer_states
from shardviz.live.step.steppers import differing, kept_by, options_of, other_options
from shardviz.relate.tolerance import SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.claims.local import Local
    from shardviz.live.probe import ProbeOnRank
    from shardviz.live.step.observe import Observed
    from shardviz.live.step.step import StepResult
    from shardviz.live.step.steppers import Kept, Options
    from shardviz.live.step.unsharded.step import UnshardedStep


ONE_OPTIMIZER = "return one torch.optim.Optimizer, or an object whose `optim` is one: a step of several is only planned"
"""What a probe's `optimizer()` has to return."""

UNSTEPPED = "return it without a step; what follows a step goes into the step() of a class of your own"


def updated(probe: ModuleType, model: nn.Module, mesh: DeviceMesh, observation: Observed) -> torch.optim.Optimizer:
    """Let the probe's optimizer update the weights, with its collectives recorded, and return it.

    Raises:
        ProbeError: `optimizer()` returned something that has no state, or that it has stepped already.
    """
    stepped: list[object] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    try:
        optimizer: torch.optim.Optimizer = probe.optimizer(model, mesh)
    finally:
        hook.remove()
    inner, kind = getattr(optimizer, "optim", optimizer), type(optimizer).__name__
    if not hasattr(inner, "state"):
        raise ProbeError(f"optimizer() returned {kind}, which has no state", ONE_OPTIMIZER)
    if any(one is inner for one in stepped):
        raise ProbeError(f"optimizer() has stepped the {kind} that it returned, and shardviz steps it", UNSTEPPED)
    with observation.comms:
        optimizer.step()
    return optimizer


def copied_gradients(locals_: Sequence[Local]) -> list[Local]:
    """Return tensors with gradients of their own: an optimizer may clip or zero the model's."""
    return [one if one.grad is None else replace(one, grad=one.grad.clone()) for one in locals_]


def update_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, before: Sequence[Local], after: Sequence[Local]
) -> tuple[list[Local], str, list[str]]:
    """Return the state and all parameters after an optimizer's step, what cannot be checked, and what is not stepped.

    That is parameters in none of its groups, or with a learning rate of zero.
    """
    groups = getattr(optimizer, "param_groups", ())
    rates = {id(param): float(group.get("lr", 1.0)) for group in groups for param in group["params"]}
    by_name = dict(_rates_by_name(model, rates))
    note = ""
    if not by_name:
        note = f"the optimizer's state: the optimizer steps {len(rates)} tensors, none of them a parameter of the model"
    elif not any(by_name.values()):
        note = "the weights after the optimizer's step: its learning rate is 0"
    weights = [one for one in after if one.role == "param"]
    idle = [one.name for one in weights if by_name and not by_name.get(one.name)]
    return [*optimizer_states(optimizer, model, before), *weights], note, idle


def _rates_by_name(model: nn.Module, rates: dict[int, float]) -> Iterator[tuple[str, float]]:
    units = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in rates:
            if (unit := unit_of(name)) is not None:
                units[unit] = rates[id(param)]
            else:
                yield clean_name(name), rates[id(param)]
    for flat in flat_params(model) if units else ():
        if flat.unit in units:
            yield flat.name, units[flat.unit]


def distinct_gradients(before: Sequence[Local], after: Sequence[Local]) -> list[Local]:
    """Return tensors with their gradients from backward, or from after the optimizer if ranks scaled them differently.

    An optimizer may clip gradients, but it must clip all parts of one gradient by the same factor. Every rank calls
    this.
    """
    grads_after = {one.name: one for one in after}
    factors_here = {
        one.name: factor for one in before if (factor := _factor(one.grad, grads_after[one.name].grad)) is not None
    }
    by_name = in_groups((name, factor) for factors in of_all_ranks(factors_here) for name, factor in factors.items())
    apart = {name for name, found in by_name.items() if max(found) - min(found) > SINGLE * max(map(abs, found))}
    return [replace(one, grad=grads_after[one.name].grad) if one.name in apart else one for one in before]


def _factor(before: torch.Tensor | None, after: torch.Tensor | None) -> float | None:
    """Return the factor by which a gradient was multiplied; None if it was not, or if that cannot be determined."""
    if before is None or after is None or before.shape != after.shape or not before.is_floating_point():
        return None
    square = float((before * before).sum())
    factor = float((before * after).sum()) / square if square else 0.0
    allowed = 4 * torch.finfo(before.dtype).eps * abs(factor)
    exact = bool(((after - before * factor).abs() <= allowed * before.abs().max()).all()) if factor else False
    return factor if exact else None


@dataclass(frozen=True, slots=True)
class UpdatedReference:
    """The unsharded model after its step and its optimizer's.

    Attributes:
        tensors: Its buffers after the step, and its weights and states after the optimizer.
        kept: What else the optimizer keeps; None if it could not step.
        options: The options with which it steps each parameter.
        is_alone: Whether the optimizer stepped as in a job of one process.
    """

    tensors: list[Local]
    kept: Kept | None = None
    options: Options = field(default_factory=dict)
    is_alone: bool = True


def updated_reference(on: ProbeOnRank, reference: UnshardedStep) -> UpdatedReference:
    """Let the probe's optimizer step the unsharded model. Every rank calls this."""
    model, buffers = reference.model, _buffers_after(reference)
    if hasattr(on.probe, "optimizer") and not reference.has_own_loss:
        what, observation = "optimizer of the unsharded model", reference.step.observation
        weights = [
            (name, param, param.detach().clone(), None if param.grad is None else param.grad.clone())
            for name, param in model.named_parameters()
        ]
        optimizer, failed = attempted(lambda: _updated_alone(on, model, observation), f"{what} in one process")
        is_alone = not failed.text
        if not is_alone:  # it names ranks, as optimizers do that split their work by hand: all ranks step it
            for _, param, values, grad in weights:
                param.data, param.grad = values, grad
            optimizer, failed = attempted(lambda: updated(on.probe, model, on.device_mesh, observation), what)
        if optimizer is None:
            on.capture.not_checked.append(("", f"the {what}: {failed.text}"))
        else:
            unchanged = [name for name, param, values, _ in weights if torch.equal(param.detach(), values)]
            on.capture.not_due += unchanged if is_alone else []
            params = [local for local in local_tensors(model) if local.role == "param"]
            tensors = [*params, *optimizer_states(optimizer, model, params), *buffers]
            return UpdatedReference(tensors, kept_by(optimizer, model), options_of(optimizer, model), is_alone)
    return UpdatedReference(buffers)


def _updated_alone(on: ProbeOnRank, model: nn.Module, observation: Observed) -> torch.optim.Optimizer:
    """Let the probe's optimizer step the unsharded model as a job of one process does."""
    mesh = mesh_of_one_rank(on.device_mesh)
    with one_process():
        return updated(on.probe, model, mesh, observation)


def _buffers_after(reference: UnshardedStep) -> list[Local]:
    """Return the unsharded model's buffers after a step on the whole batch; none if ranks' parts differ."""
    whole = reference.whole if reference.is_mean_of_means and reference.whole is not None else reference
    buffers = [local for local in local_tensors(whole.model) if local.role == "buffer"]
    return buffers if whole.whole is None else []


def updated_shards(
    on: ProbeOnRank, model: nn.Module, before: list[Local], step: StepResult, unsharded: UpdatedReference
) -> tuple[list[Local], list[Local]]:
    """Let the optimizer step. A probe without an optimizer gets Adam, and only Adam's state is kept.

    Returns:
        The tensors with the gradients to check; and the optimizer's state with the updated weights.
    """
    if not hasattr(on.probe, "optimizer"):
        return before, adam_states(model, before)
    before = copied_gradients(before)
    with writes_to_gathered(unwrapped(model)) as written:
        optimizer, failed = attempted(lambda: updated(on.probe, model, on.device_mesh, step.observation), "optimizer")
        on.capture.written_gathered += written()
    if optimizer is None:
        if unsharded.kept is not None:
            on.capture.raised.append(RaisedRecord("optimizer", failed.text, failed.module))
        else:
            alone = ("", f"the optimizer of the unsharded model: {failed.text}")
            on.capture.not_checked = [note for note in on.capture.not_checked if note != alone]
            on.capture.not_checked.append(("", f"the optimizer: {failed.text}"))
        return before, []
    after = list(local_tensors(unwrapped(model), on.job.mesh))
    tensors, note, idle = update_of(optimizer, unwrapped(model), before, after)
    on.capture.not_checked += [("", note)] if note else []
    if unsharded.kept is not None:
        others = list(differing(kept_by(optimizer, unwrapped(model)), unsharded.kept))
        on.capture.not_checked += [("", why) for _, why in others]
        on.capture.other_settings += [kind for kind, _ in others]
        on.capture.other_options += other_options(options_of(optimizer, unwrapped(model)), unsharded.options)
    on.capture.not_stepped += idle
    return distinct_gradients(before, after), tensors
