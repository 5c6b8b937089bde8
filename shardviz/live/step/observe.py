"""Watch a model run one step: what every module puts out, what ranks send each other, what a pipeline's stages do."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records import StageRecord
from shardviz.live.capture.locals import Local, of_tensor, unwrapped
from shardviz.live.compat import DTensor, asks_for_shapes, clean_name, flat_params, quiet_redistribution
from shardviz.live.step.comms import Comms
from shardviz.live.step.running import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

MAX_MODULES = 256
"""Of a model with more modules than this no activations are kept."""


@dataclass
class Observed:
    """What was seen of a step.

    Attributes:
        comms: The collectives.
        outputs: What the model itself put out, run by run; of a pipeline, what its last stage on this rank did.
        activations: What each of its modules put out first, by name.
        schedule: What a pipeline's stages ran, in order.
        asking: Whether a stage runs just now only for torch to learn shapes: on numbers that are none.
    """

    comms: Comms
    outputs: list[torch.Tensor] = field(default_factory=list)
    activations: dict[str, Local] = field(default_factory=dict)
    schedule: list[StageRecord] = field(default_factory=list)
    asking: bool = False


@contextmanager
def observed(model: nn.Module, stages: Mapping[int, nn.Module] | None = None) -> Iterator[Observed]:
    """Watch all that runs within.

    Args:
        model: The model; hooks on its modules are removed in the end.
        stages: This rank's stages of a pipeline, by number.
    """
    inner = unwrapped(model)
    seen = Observed(Comms(inner))
    modules = list(inner.named_modules())[1:]
    last = stages[max(stages)] if stages else inner
    with ExitStack() as stack:
        stack.callback(last.register_forward_hook(_keep_output(seen)).remove)
        for name, module in modules if len(modules) < MAX_MODULES else ():
            stack.callback(module.register_forward_hook(_keep_activation(seen, clean_name(name))).remove)
        for number, module in (stages or {}).items():
            for handle in _follow(seen, number, module):
                stack.callback(handle.remove)
        stack.enter_context(seen.comms)
        yield seen


def _keep_output(seen: Observed) -> Any:
    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        if torch.is_tensor(output) and not seen.asking:
            seen.outputs.append(output.detach())

    return keep


def _keep_activation(seen: Observed, name: str) -> Any:
    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        if torch.is_tensor(output) and not seen.asking and name not in seen.activations:
            local = of_tensor(name, "activation", output)
            # Copied as a plain tensor: the clone of a DTensor with a pending sum is the sum.
            seen.activations[name] = replace(local, values=local.values.clone(), grad=None)

    return keep


def _follow(seen: Observed, number: int, stage: nn.Module) -> Iterator[Any]:
    """Note when a stage runs; micro-batches come in order, forward and backward alike."""

    def note(*, backward: bool) -> None:
        done = sum(one.stage == number and one.backward == backward for one in seen.schedule)
        seen.schedule.append(StageRecord(number, done, backward))

    def begin(_module: Any, inputs: tuple[Any, ...]) -> None:
        seen.asking = asks_for_shapes(inputs)
        if not seen.asking:
            note(backward=False)

    def end(_module: Any, _inputs: Any, output: Any) -> None:
        for tensor in [] if seen.asking else list(tensors_in(output))[:1]:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: note(backward=True))  # type: ignore[no-untyped-call]
        seen.asking = False

    yield stage.register_forward_pre_hook(begin)
    yield stage.register_forward_hook(end)


def adam_states(model: nn.Module, params: Sequence[Local]) -> list[Local]:
    """Return the state that Adam keeps of every parameter with a gradient, a rank for what it holds.

    Adam goes element by element, so shards are stepped alone; through DTensors a first step takes a hundred times as
    long. Every rank calls this: a gradient that is placed otherwise than its parameter is first brought there.

    Args:
        model: The model, after backward.
        params: Its parameters as captured.
    """
    moved = dict(_moved_gradients(model))
    found: list[Local] = []
    for local in params:
        grad = moved.get(local.name, local.grad)
        if local.role == "param" and grad is not None and grad.shape == local.values.shape:
            shard = local.values.detach().clone().requires_grad_()
            shard.grad = grad.detach().clone()
            optimizer = torch.optim.Adam([shard], foreach=False)
            optimizer.step()
            for kind, state in optimizer.state[shard].items():
                if torch.is_tensor(state) and state.ndim:
                    found.append(replace(local, name=f"{local.name}.{kind}", role="optim", values=state, grad=None))
    return found


def _moved_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield gradients that are placed otherwise than their parameters, as an optimizer redistributes them."""
    for name, param in unwrapped(model).named_parameters():
        grad = param.grad
        if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
            with quiet_redistribution():
                yield clean_name(name), grad.redistribute(placements=param.placements).to_local()


def optimizer_states(optimizer: torch.optim.Optimizer, model: nn.Module, params: Sequence[Local]) -> list[Local]:
    """Return the optimizer's state of every parameter, under names such as `up.weight.exp_avg`.

    Args:
        optimizer: After its step; of one that is itself sharded, this rank's part is looked at.
        model: The model that it steps.
        params: The model's parameters as captured, which say where the state of a flat parameter's stretch is.
    """
    own = getattr(optimizer, "optim", optimizer)
    by_name = {local.name: local for local in params}
    found: list[Local] = []
    for name, parameter in model.named_parameters():
        for kind, state in own.state.get(parameter, {}).items():
            if torch.is_tensor(state) and state.ndim:
                found += _of_state(clean_name(name), kind, state, model, by_name)
    return found


def _of_state(
    name: str, kind: str, state: torch.Tensor, model: nn.Module, by_name: Mapping[str, Local]
) -> Iterator[Local]:
    if name.endswith("_flat_param"):
        unit = name.removesuffix("_flat_param").removesuffix(".")
        for param in flat_params(model):
            if param.unit == unit:
                values = param.cut(state.detach())
                yield replace(by_name[param.name], name=f"{param.name}.{kind}", role="optim", values=values, grad=None)
    elif name in by_name and by_name[name].flat is not None:
        flattened = state.detach().flatten()
        yield replace(by_name[name], name=f"{name}.{kind}", role="optim", values=flattened, grad=None)
    else:
        yield of_tensor(f"{name}.{kind}", "optim", state)
