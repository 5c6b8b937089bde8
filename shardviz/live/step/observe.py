"""Record one step of a model: every module's output, the collectives, a pipeline's runs, the masks that it drew."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.dump.records.step import MaskRecord, StageRecord
from shardviz.live.capture.describe import digest
from shardviz.live.claims.registry import of_tensor, unwrapped
from shardviz.live.compat.ddp import running_ddp
from shardviz.live.compat.fsdp import flat_params
from shardviz.live.compat.meshes import quiet_redistribution
from shardviz.live.compat.modules import clean_name, unit_of
from shardviz.live.compat.pipelines import asks_for_shapes
from shardviz.live.step.comms import Comms
from shardviz.live.step.module_recorder import Trace
from shardviz.live.step.return_values import Returned, is_array
from shardviz.live.step.running import tensors_in
from shardviz.live.trace_modules import NONE, Followed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from shardviz.live.claims.local import Local


@dataclass
class Observed:
    """The record of a step.

    Attributes:
        outputs: The model's own outputs, run by run; in a pipeline, those of its last stage on this rank.
        returned: All that these runs returned, whether one tensor or more.
        schedule: The runs of a pipeline's stages, in order.
        trace: What went in and out of every module, and the gradients of that.
        asking: Whether a stage is running only so that torch can infer shapes, on meaningless values.
        around: The DDP that ran the model, which the step may have made; None if none did.
    """

    comms: Comms
    outputs: list[torch.Tensor] = field(default_factory=list)
    returned: list[Returned] = field(default_factory=list)
    schedule: list[StageRecord] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    asking: bool = False
    around: nn.Module | None = None


@contextmanager
def observed(
    model: nn.Module, stages: Mapping[int, nn.Module] | None = None, followed: Followed = NONE, *, values: bool = True
) -> Iterator[Observed]:
    """Record everything that the model runs inside this context.

    Args:
        model: The model; the hooks on its modules are removed at the end.
        values: Whether outputs and gradients are kept; if nothing has values, only collectives and stages are.
    """
    inner = unwrapped(model)
    observation = Observed(Comms(inner))
    last = stages[max(stages)] if stages else inner
    observation.trace.is_paused = lambda: observation.asking
    observation.comms.on_write = observation.trace.forget
    with ExitStack() as stack:
        if values:
            keep = last.register_forward_hook(_keep_output(observation))
            for handle in (*observation.trace.follow(inner, followed), keep):
                stack.callback(handle.remove)
        for number, module in (stages or {}).items():
            for handle in _follow(observation, number, module):
                stack.callback(handle.remove)
        stack.enter_context(observation.comms if values else observation.comms.only_modules())
        yield observation


def _keep_output(observation: Observed) -> Any:
    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        observation.around = running_ddp() or observation.around
        if not observation.asking:
            observation.returned.append(Returned.safely(output))
        if torch.is_tensor(output) and not observation.asking and is_array(output):
            observation.outputs.append(output.detach())

    return keep


def _follow(observation: Observed, number: int, stage: nn.Module) -> Iterator[Any]:
    """Record when a stage runs; micro-batches come in order, both forward and backward."""

    def note(*, backward: bool) -> None:
        done = sum(one.stage == number and one.backward == backward for one in observation.schedule)
        observation.schedule.append(StageRecord(number, done, backward))

    def begin(_module: Any, inputs: tuple[Any, ...]) -> None:
        observation.asking = asks_for_shapes(inputs)
        if not observation.asking:
            note(backward=False)

    def end(_module: Any, _inputs: Any, output: Any) -> None:
        for tensor in [] if observation.asking else list(tensors_in(output))[:1]:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: note(backward=True))  # type: ignore[no-untyped-call]
        observation.asking = False

    yield stage.register_forward_pre_hook(begin)
    yield stage.register_forward_hook(end)


def adam_states(model: nn.Module, params: Sequence[Local]) -> list[Local]:
    """Return Adam's state for this rank's shard of every parameter with a gradient.

    Adam works element by element, so shards are stepped as plain tensors; a first step through DTensors takes a hundred
    times as long. Every rank calls this: a gradient whose placements are not its parameter's is first redistributed.
    """
    moved, again = dict(_moved_gradients(model)), tied_again(unwrapped(model))
    states: list[Local] = []
    for local in params:
        grad = None if local.name in again else moved.get(local.name, local.grad)
        if local.role == "param" and grad is not None and grad.shape == local.values.shape:
            shard = local.values.detach().clone().requires_grad_()
            shard.grad = grad.detach().clone()
            optimizer = torch.optim.Adam([shard], foreach=False)
            optimizer.step()
            for kind, state in optimizer.state[shard].items():
                if torch.is_tensor(state) and state.ndim:
                    states.append(replace(local, name=f"{local.name}.{kind}", role="optim", values=state, grad=None))
    return states


def tied_again(model: nn.Module) -> set[str]:
    """Return the names under which a parameter that is tied comes again: an optimizer has one state for it."""
    first = {clean_name(name) for name, _ in model.named_parameters()}
    return {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - first


def _moved_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield gradients whose placements are not their parameters', redistributed as an optimizer does."""
    for name, param in unwrapped(model).named_parameters():
        grad = param.grad
        if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
            with quiet_redistribution():
                yield clean_name(name), grad.redistribute(placements=param.placements).to_local()


def optimizer_states(optimizer: torch.optim.Optimizer, model: nn.Module, params: Sequence[Local]) -> list[Local]:
    """Return the optimizer's state of every parameter, under names such as `up.weight.exp_avg`.

    Args:
        optimizer: The optimizer after its step; if it is itself sharded, this rank's part counts.
        params: The model's parameters as captured, which give the place of a flat parameter's stretch.
    """
    inner = getattr(optimizer, "optim", optimizer)
    by_name = {local.name: local for local in params}
    states: list[Local] = []
    for name, parameter in model.named_parameters():
        for kind, state in inner.state.get(parameter, {}).items():
            if torch.is_tensor(state) and state.ndim:
                states += _of_state(clean_name(name), kind, state, model, by_name)
    return states


def _of_state(
    name: str, kind: str, state: torch.Tensor, model: nn.Module, by_name: Mapping[str, Local]
) -> Iterator[Local]:
    if (unit := unit_of(name)) is not None:
        for param in flat_params(model):
            if param.unit == unit:
                values = param.cut(state.detach())
                yield replace(by_name[param.name], name=f"{param.name}.{kind}", role="optim", values=values, grad=None)
    elif name in by_name and by_name[name].flat is not None:
        flattened = state.detach().flatten()
        yield replace(by_name[name], name=f"{name}.{kind}", role="optim", values=flattened, grad=None)
    else:
        yield of_tensor(f"{name}.{kind}", "optim", state)


DRAWN = frozenset({"bernoulli", "bernoulli_"})
KEPT = frozenset({"div", "div_", "mul", "mul_", "where", "masked_fill", "masked_fill_"})


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask that was drawn.

    Attributes:
        kept: Which elements it keeps.
        given: What it was laid on.
    """

    kept: torch.Tensor
    given: torch.Tensor


class Masks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the masks that are drawn inside this context, in order, as dropout does.

    Only plain tensors are looked at: DTensors have a random state of their own.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[Mask] = []
        self._drawn: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            self._add(output[1], args[0])
        elif name in DRAWN and type(output) is torch.Tensor:
            self._drawn[id(output)] = output
        elif name in KEPT and self._drawn:
            self._follow(name, [arg for arg in args if type(arg) in (torch.Tensor, torch.nn.Parameter)], output)
        return output

    def _follow(self, name: str, tensors: Sequence[torch.Tensor], output: Any) -> None:
        masks = [one for one in tensors if id(one) in self._drawn]
        others = [one for one in tensors if one.numel() > 1 and id(one) not in self._drawn]
        if masks and others:
            self._add(self._drawn.pop(id(masks[0])), others[0])
        elif masks and name.startswith(("div", "mul")):
            self._drawn[id(output)] = output

    def _add(self, mask: torch.Tensor, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor or mask.shape != tensor.shape or not mask.numel():
            return
        self.masks.append(Mask((mask != 0).detach(), tensor.detach().clone()))


def mask_records(alike: Sequence[Mask], again: Sequence[Mask], whole: Sequence[Mask]) -> list[MaskRecord]:
    """Return what a dump keeps of this rank's masks.

    Args:
        alike: Those of a step in which all ranks were seeded alike.
        again: Those of one in which each rank was seeded differently.
        whole: Those of the unsharded model.
    """
    if not len(alike) == len(again) == len(whole):
        return []
    return [
        MaskRecord(
            digest(mask.kept),
            digest(repeated.kept),
            digest(mask.given),
            mask.kept.numel(),
            int(mask.kept.sum()),
            unsharded.kept.numel(),
        )
        for mask, repeated, unsharded in zip(alike, again, whole, strict=True)
    ]
