"""Optimizer states of every parameter, without values: by rule, or by the probe's optimizer.

Tensors that wrap others, such as weights in 8 bits, are taken apart, so that bytes are right. A captured job names them
and looks no further, since only their class knows what their elements mean. A plan has no elements: it needs only to
know how many there are, of how many bytes each.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardviz.errors import ShardvizError
from shardviz.live.claims.local import Local
from shardviz.live.claims.registry import of_tensor, unwrapped
from shardviz.live.compat.meshes import local_of, quiet_redistribution
from shardviz.live.compat.modules import clean_name
from shardviz.live.compat.tensors import inner_tensors
from shardviz.live.plan.forks import one_line
from shardviz.live.plan.reads import Answers
from shardviz.live.step.observe import optimizer_states, tied_again

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Role
    from shardviz.live.plan.dry_step import PlannedStep
    from shardviz.live.plan.planning import PlanJob
    from shardviz.live.plan.rank import Built


KINDS = {
    "adam": ("Adam", ("exp_avg", "exp_avg_sq")),
    "momentum": ("SGD with momentum", ("momentum_buffer",)),
    "none": ("", ()),
}
"""By the word of --optimizer: its name, and what it keeps in the shape of a parameter."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, as far as memory goes.

    Attributes:
        kind: A name in `KINDS`; empty for the probe's own, or Adam if it has none.
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
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShardvizError(f"torch has no element type {name!r}", "float32, bfloat16, float16, ...")
    return dtype


def states(
    job: PlanJob,
    probe: ModuleType,
    built: Built,
    mesh: DeviceMesh,
    params: Sequence[Local],
    grads: Sequence[Local],
    step: PlannedStep,
) -> tuple[list[Local], str]:
    """Return the state of every parameter that has a gradient, and the optimizer's name.

    That is the probe's own optimizer if there is one and a step was planned, after which the model has gradients.
    """
    optimizer = job.optimizer
    if not optimizer.kind and hasattr(probe, "optimizer") and step.comms is not None:
        state_locals = _state_of_probe(job, probe, built, mesh, params, step)
        if state_locals is not None:
            return state_locals
    trained = {grad.name for grad in grads} - tied_again(unwrapped(built.model))
    optimizer_name, kinds = KINDS[optimizer.kind or "adam"]
    trained_params = (param for param in params if param.role == "param" and param.name in trained)
    return [state for param in trained_params for state in _states_by_rule(optimizer, kinds, param)], optimizer_name


def _state_of_probe(
    job: PlanJob, probe: ModuleType, built: Built, mesh: DeviceMesh, params: Sequence[Local], step: PlannedStep
) -> tuple[list[Local], str] | None:
    """Return the state of the probe's own optimizer after a step; None if it has none."""
    parts: list[Any] = []
    answers = Answers(1, 1)
    try:
        with step.without_values, answers, quiet_redistribution():
            optimizer = probe.optimizer(built.model, mesh)
            parts = _parts(optimizer)
            with step.comms or contextlib.nullcontext():
                optimizer.step()
    except Exception as error:
        if not _are_made(parts):
            why = f"optimizer() or its step raised {one_line(error)}"
            why = error.message if isinstance(error, ShardvizError) else why
            step.notes.append(f"the optimizer's state is counted as Adam's, and may not be that: {why}")
            return None
        step.notes.append(f"the optimizer's state is what it had made when its step raised {one_line(error)}")
    if answers.lines:
        step.notes.append(
            f"the optimizer reads {answers.reads}, taken as 1: what it keeps is taken not to depend on it"
        )
    if job.optimizer.dtype or job.optimizer.master:
        step.notes.append("--state and --master are not used: the probe's optimizer() says what is kept")
    names = dict.fromkeys(type(part).__name__ for part in parts)
    model = unwrapped(built.model)
    return [local for part in parts for local in _states_of(part, model, params)], ", ".join(names)


def _states_of(optimizer: Any, model: nn.Module, params: Sequence[Local]) -> Iterator[Local]:
    """Yield an optimizer's state; wrappers are taken apart, as into 8-bit codes and scales."""
    tensors = {
        f"{clean_name(name)}.{kind}": value
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
        if torch.is_tensor(value)
    }
    return taken_apart(optimizer_states(optimizer, model, params), tensors)


def _are_made(parts: Sequence[Any]) -> bool:
    """Whether optimizers have a state for every parameter with a gradient, stepped or not."""
    stepped = [
        bool(part.state.get(param))
        for part in parts
        for group in part.param_groups
        for param in group["params"]
        if param.grad is not None
    ]
    return bool(stepped) and all(stepped)


def _parts(optimizer: Any) -> list[Any]:
    """Return an optimizer, without its wrapper, or those that an object with a `step` of its own has."""
    if hasattr(optimizer, "state") or hasattr(optimizer, "optim"):
        return [getattr(optimizer, "optim", optimizer)]
    parts: list[Any] = []
    for value in getattr(optimizer, "__dict__", {}).values():
        inside = value if isinstance(value, (list, tuple)) else [value]
        parts += [part for part in inside if isinstance(part, torch.optim.Optimizer)]
    if not parts:
        name = type(optimizer).__name__
        raise ShardvizError(f"optimizer() returned {name}, which has no state and no torch.optim.Optimizer")
    return parts


def _states_by_rule(optimizer: Optimizer, kinds: Iterable[str], param: Local) -> Iterator[Local]:
    dtype = dtype_of(optimizer.dtype) if optimizer.dtype else param.values.dtype
    dtypes = dict.fromkeys(kinds, dtype)
    if optimizer.master and param.values.dtype.itemsize < torch.float32.itemsize:
        dtypes["master"] = torch.float32
    for kind, dtype in dtypes.items():
        values = torch.empty(param.values.shape, dtype=dtype, device="meta")
        yield replace(param, name=f"{param.name}.{kind}", role="optim", values=values, grad=None)


def taken_apart(locals_: Iterable[Local], tensors: Mapping[str, torch.Tensor]) -> Iterator[Local]:
    """Yield tensors; one that wraps others, which its name leads to, is replaced by them."""
    for local in locals_:
        parts = _parts_of(local.name, local.role, tensors[local.name]) if local.name in tensors else []
        yield from parts or [local]


def _parts_of(name: str, role: Role, tensor: torch.Tensor) -> list[Local]:
    """Return what a tensor is made of; nothing for a tensor with elements of its own.

    The part that has an element for each of its own is split as it is, and has its name and its gradient. The others,
    such as scales, are what this rank has of them: `up.weight.scale` of a weight, `up.weight.exp_avg_scale` of a state.
    """
    wrapper, parts = local_of(tensor), list[Local]()
    for attribute, inner in inner_tensors(wrapper).items():
        if inner.shape == wrapper.shape and not any(part.name == name for part in parts):
            parts.append(_main_part(name, role, inner.detach(), tensor))
        else:
            part_name = f"{name}{'_' if role == 'optim' else '.'}{attribute.replace('.', '_')}"
            parts.append(Local(part_name, role, tuple(inner.shape), inner.detach()))
    return parts


def _main_part(name: str, role: Role, inner: torch.Tensor, of: torch.Tensor) -> Local:
    """Return a part with the placements and the gradient of the tensor that it is of."""
    if isinstance(of, DTensor):
        shape, stride = of.shape, of.stride()
        inner = DTensor.from_local(inner, of.device_mesh, of.placements, run_check=False, shape=shape, stride=stride)
    local = of_tensor(name, role, inner)
    if not of.is_leaf or of.grad is None:
        return local
    grad = of_tensor(name, "grad", of.grad)
    return replace(local, grad=grad.values, grad_claim=grad.claim)
