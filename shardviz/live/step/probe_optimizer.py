"""The probe's own optimizer, stepped for the unsharded model and for the sharded one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shardviz.live.capture.agreement import attempted
from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.compat import mesh_of_one_rank, one_process, writes_to_gathered
from shardviz.live.step.observe import adam_states, optimizer_states
from shardviz.live.step.optimizer_settings import differing, kept_by, options_of, other_options
from shardviz.live.step.update import copied_gradients, distinct_gradients, update_of, updated

if TYPE_CHECKING:
    from torch import nn

    from shardviz.live.capture.locals import Local
    from shardviz.live.probe import ProbeOnRank
    from shardviz.live.step.observe import Observed
    from shardviz.live.step.optimizer_settings import Kept, Options
    from shardviz.live.step.step import StepResult
    from shardviz.live.step.unsharded.step import UnshardedStep


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
            (name, param, param.detach().clone(), _cloned(param.grad)) for name, param in model.named_parameters()
        ]
        optimizer, failed = attempted(lambda: _updated_alone(on, model, observation), f"{what} in one process")
        is_alone = not failed
        if not is_alone:  # it names ranks, as optimizers do that split their work by hand: all ranks step it
            for _, param, values, grad in weights:
                param.data, param.grad = values, grad
            optimizer, failed = attempted(lambda: updated(on.probe, model, on.device_mesh, observation), what)
        if optimizer is None:
            on.capture.not_checked.append(("", f"the {what}: {failed}"))
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


def _cloned(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.clone()


def _buffers_after(reference: UnshardedStep) -> list[Local]:
    """Return the unsharded model's buffers after a step on the whole batch; none if ranks' parts differ."""
    whole = reference.whole if reference.is_mean_of_means and reference.whole is not None else reference
    buffers = [local for local in local_tensors(whole.model) if local.role == "buffer"]
    return buffers if whole.whole is None else []


def updated_shards(
    on: ProbeOnRank, model: nn.Module, before: list[Local], step: StepResult, unsharded: UpdatedReference
) -> tuple[list[Local], list[Local]]:
    """Let the optimizer step. A probe without an optimizer gets Adam, and only Adam's state is kept.

    Args:
        on: The probe.
        model: The sharded model.
        before: Its tensors before the step.
        step: The step.
        unsharded: The unsharded model after its optimizer's step.

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
            on.capture.raised.append(("optimizer", failed))
        else:
            alone = ("", f"the optimizer of the unsharded model: {failed}")
            on.capture.not_checked = [note for note in on.capture.not_checked if note != alone]
            on.capture.not_checked.append(("", f"the optimizer: {failed}"))
        return before, []
    after = list(local_tensors(unwrapped(model), on.job.mesh))
    update = update_of(optimizer, unwrapped(model), before, after)
    on.capture.not_checked += [("", why) for why in update.not_checked]
    if unsharded.kept is not None:
        others = list(differing(kept_by(optimizer, unwrapped(model)), unsharded.kept))
        on.capture.not_checked += [("", why) for _, why in others]
        on.capture.other_settings += [kind for kind, _ in others]
        on.capture.other_options += other_options(options_of(optimizer, unwrapped(model)), unsharded.options)
    on.capture.not_stepped += update.not_stepped
    return distinct_gradients(before, after), update.tensors
