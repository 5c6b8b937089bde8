"""The state that an optimizer keeps of every parameter, without values: by rule, or from the probe's own optimizer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.errors import ShardvizError
from shardviz.live.capture.locals import unwrapped
from shardviz.live.compat import clean_name, quiet_redistribution
from shardviz.live.plan.forks import one_line
from shardviz.live.plan.step.answers import Answers
from shardviz.live.plan.wrapped import parts_of
from shardviz.live.step.observe import optimizer_states, tied_again

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.locals import Local
    from shardviz.live.plan.asked import Question
    from shardviz.live.plan.building import Built
    from shardviz.live.plan.step.planned import PlannedStep

NAMES = {"adam": "Adam", "momentum": "SGD with momentum", "none": ""}

KINDS: dict[str, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "momentum": ("momentum_buffer",),
    "none": (),
}
"""What each optimizer keeps, of the shape of the parameter."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, as far as memory goes.

    Attributes:
        kind: A name in `KINDS`; empty for the probe's own, or Adam where it has none.
        dtype: The element type of its state; empty for that of each parameter.
        master: Whether it keeps a float32 copy of every parameter that is narrower.
    """

    kind: str = ""
    dtype: str = ""
    master: bool = False


def dtype_of(name: str) -> torch.dtype:
    """Return an element type by its name.

    Raises:
        ShardvizError: torch has no such element type.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ShardvizError(f"torch has no element type {name!r}", "float32, bfloat16, float16, ...")
    return found


@dataclass(frozen=True)
class States:
    """What an optimizer keeps.

    Attributes:
        tensors: Its state.
        of: The optimizer's name.
    """

    tensors: list[Local]
    of: str


def states(
    question: Question,
    built: Built,
    mesh: DeviceMesh,
    params: Sequence[Local],
    grads: Sequence[Local],
    step: PlannedStep | None,
) -> States:
    """Return the state of every parameter that has a gradient.

    Args:
        question: Whose optimizer it is.
        built: The model, with the gradients of a step if one was planned.
        mesh: The mesh.
        params: The model's parameters.
        grads: Their gradients.
        step: The step; None where none was planned.
    """
    wanted = question.optimizer
    if not wanted.kind and hasattr(question.probe, "optimizer") and step is not None:
        found = _of_own(question, built, mesh, params, step)
        if found is not None:
            return found
    trained = {grad.name for grad in grads} - tied_again(unwrapped(built.model))
    by_rule = _by_rule(wanted, [one for one in params if one.role == "param" and one.name in trained])
    return States(by_rule, NAMES[wanted.kind or "adam"])


def _of_own(
    question: Question, built: Built, mesh: DeviceMesh, params: Sequence[Local], step: PlannedStep
) -> States | None:
    """Return the state of the probe's own optimizer, once it has stepped; None where it has not made any."""
    parts: list[Any] = []
    answers = Answers(1, 1)
    try:
        with step.without_values, answers, quiet_redistribution():
            own = question.probe.optimizer(built.model, mesh)
            parts = _parts(own)
            with step.comms or contextlib.nullcontext():
                own.step()
    except Exception as error:
        if not _are_made(parts):
            step.notes.append(f"the optimizer's state is counted as Adam's, and may not be that: {_reason(error)}")
            return None
        step.notes.append(f"the optimizer's state is what it had made when its step raised {one_line(error)}")
    if answers.lines:
        step.notes.append(f"the optimizer reads {answers.said}, taken as 1: what it keeps is taken not to depend on it")
    if question.optimizer.dtype or question.optimizer.master:
        step.notes.append("--state and --master are not used: the probe's optimizer() says what is kept")
    names = dict.fromkeys(type(getattr(part, "optim", part)).__name__ for part in parts)
    model = unwrapped(built.model)
    return States([one for part in parts for one in _kept(part, model, params)], ", ".join(names))


def _kept(optimizer: Any, model: nn.Module, params: Sequence[Local]) -> Iterator[Local]:
    """Yield an optimizer's state, taken apart where it wraps other tensors: numbers of 8 bits and their scales."""
    state = getattr(optimizer, "optim", optimizer).state
    wrapped = {
        f"{clean_name(name)}.{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in state.get(parameter, {}).items()
        if torch.is_tensor(value)
    }
    for local in optimizer_states(optimizer, model, params):
        parts = parts_of(local.name, "optim", wrapped[local.name]) if local.name in wrapped else []
        yield from parts or [local]


def _are_made(parts: Sequence[Any]) -> bool:
    """Whether optimizers have a state for every parameter that has a gradient: some make all of it before they step."""
    own = [getattr(part, "optim", part) for part in parts]
    stepped = [
        bool(one.state.get(param))
        for one in own
        for group in one.param_groups
        for param in group["params"]
        if param.grad is not None
    ]
    return bool(stepped) and all(stepped)


def _reason(error: Exception) -> str:
    if isinstance(error, ShardvizError):
        return error.message
    return f"optimizer() or its step raised {one_line(error)}"


def _parts(own: Any) -> list[Any]:
    """Return an optimizer, or those that an object with a `step` of its own has.

    Raises:
        ShardvizError: It has none.
    """
    if hasattr(own, "state") or hasattr(own, "optim"):
        return [own]
    inside = [
        value
        for one in getattr(own, "__dict__", {}).values()
        for value in (one if isinstance(one, (list, tuple)) else [one])
    ]
    found = [one for one in inside if isinstance(one, torch.optim.Optimizer)]
    if not found:
        raise ShardvizError(
            f"optimizer() returned {type(own).__name__}, which has no state and no torch.optim.Optimizer"
        )
    return found


def _by_rule(wanted: Optimizer, trained: Sequence[Local]) -> list[Local]:
    found: list[Local] = []
    for local in trained:
        dtype = dtype_of(wanted.dtype) if wanted.dtype else local.values.dtype
        kinds = [(kind, dtype) for kind in KINDS[wanted.kind or "adam"]]
        if wanted.master and local.values.dtype.itemsize < torch.float32.itemsize:
            kinds.append(("master", torch.float32))
        for kind, of in kinds:
            values = torch.empty(local.values.shape, dtype=of, device="meta")
            found.append(replace(local, name=f"{local.name}.{kind}", role="optim", values=values, grad=None))
    return found
