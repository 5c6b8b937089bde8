"""The unsharded model's step, and how it is made comparable with the sharded step.

Random numbers: a sharded model draws different ones. If a model draws any while it trains, as dropout does, both are
stepped in `eval()`. Rows that are not independent: BatchNorm in training, or a loss that is not a mean over rows, sees
the whole batch in the unsharded model and only a part on each rank. Data parallel training computes the mean over such
parts, so the unsharded model computes that mean too. A note reports either case. If the ranks correct for it, for
example by dividing the loss by the number of all ranks' tokens, the mean of their losses equals the whole batch's, and
the sharded step is compared with the whole batch instead.

How far rounding alone takes a step in narrow numbers is seen in a second one, from all that it starts from moved a
little. Sums in another order, and terms that are rounded before they are summed, take a right step about as far.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pickle import PicklingError
from typing import TYPE_CHECKING

import torch

from shardviz.dump.records.step import NoiseRecord, of_replay
from shardviz.dump.records.trace import COMPARED_OVER_PARTS
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.claims.local import Local
from shardviz.live.claims.registry import local_tensors
from shardviz.live.compat.meshes import whole_of
from shardviz.live.compat.modules import clean_name
from shardviz.live.compat.worlds import one_process
from shardviz.live.step.batch import each, part_of
from shardviz.live.step.observe import observed
from shardviz.live.step.output_parts import wanted_outputs
from shardviz.live.step.return_values import are_parts_of
from shardviz.live.step.step import StepResult, agreed_clips, logged_by, loss_of, sizes_of
from shardviz.live.step.unsharded.probe_loss import is_weighted_mean, why_apart
from shardviz.live.trace_modules import NONE, Followed
from shardviz.live.world.group import random_states
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import CANCELED, LEAST_FACTOR, LOSS_IN_FLOAT64, ROUNDINGS_OF_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import ModuleType

    from torch import nn

    from shardviz.check.step.trace.step_judge import Sides, StepJudge
    from shardviz.dump.records.base import Role
    from shardviz.dump.records.trace import StepAnswer
    from shardviz.live.capture.capture import Capture
    from shardviz.live.step.batch import Batch, Setting


DRAWS = "the step in training: it draws random numbers, as dropout does, and a sharded model draws different ones"
DRAWS_IN_EVAL = "the step: it draws random numbers even in eval(), and a sharded model draws different ones"


@dataclass(frozen=True)
class UnshardedStep:
    """The unsharded model after its step.

    Attributes:
        model: The model, with its gradients.
        before: Its tensors before the step.
        training: Whether it was stepped in training mode; otherwise in `eval()`.
        draws: Whether it drew random numbers in the end, so that no other step can be compared with it.
        notes: Notes on how it was stepped.
        whole: The reference over the whole batch, if this one is the mean over parts.
        is_mean_of_means: Whether it is the loss alone that depends on the parts, and not the outputs.
        parts: The number of parts of the batch that it ran on, one after the other.
        dim: The dim of the batch that was parted.
        turns: How many micro-batches made up each part's rows, one run of the model for each.
        moved: The same step with weights and batch moved by its rounding; None if that was not measured.
        has_own_loss: Whether the sharded step's loss is another one, so that it has only the forward in common.
        is_called_otherwise: Whether that step calls the model with something else than the batch, too.
    """

    model: nn.Module
    before: tuple[Local, ...]
    step: StepResult
    training: bool = True
    draws: bool = False
    notes: tuple[str, ...] = ()
    whole: UnshardedStep | None = None
    is_mean_of_means: bool = False
    parts: int = 1
    dim: int = 0
    turns: int = 1
    moved: UnshardedStep | None = None
    has_own_loss: bool = False
    is_called_otherwise: bool = False

    @property
    def narrowed_to(self) -> set[torch.dtype]:
        """The dtypes that it computes with and that are narrower than float64."""
        dtypes = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        return {*self.step.observation.comms.narrowed_to, *(dtypes - {torch.float64})}

    @property
    def precision(self) -> float:
        """The relative precision of the step's narrowest numbers; 0 in float64 throughout."""
        return precision_of(self.narrowed_to)

    @property
    def cancels(self) -> bool:
        """Whether the loss or all gradients may be rounding alone, compared with their terms."""
        calls = [call for calls in self.step.observation.trace.calls.values() for call in calls]
        terms = _largest(seen.gradient for call in calls for seen in (*call.inputs, *call.outputs))
        gradients = _largest(parameter.grad for parameter in self.model.parameters())
        is_small_loss = float(self.step.loss.abs()) < CANCELED * _largest([self.step.output])
        return gradients < CANCELED * terms or is_small_loss

    def num_calls(self, module: str) -> int:
        """Return how often a module is called in one forward of the whole batch."""
        count = len(self.step.observation.trace.calls.get(module, ())) // self.parts
        return count if count % self.turns else count // self.turns

    def in_turns_of(self, step: StepResult) -> UnshardedStep:
        """Return the reference with its runs apart unless the sharded step's are joined. Every rank calls this."""
        is_joined = all(of_all_ranks(step.output is None or step.runs == 1))
        if is_joined or self.turns == 1 or self.step.output is None:
            return self
        output = self.step.observation.outputs[-1]
        return replace(self, turns=1, step=replace(self.step, output=output, runs=self.turns))

    def once_more(self, step: StepResult, probe: ModuleType, setting: Setting) -> UnshardedStep | None:
        """Step the model once more with everything moved by the step's rounding.

        None for a step in float64 whose results are far larger than what rounding does to them.
        """
        in_double = torch.finfo(torch.float64).eps if self.cancels else 0.0
        precision = max(of_all_ranks(max(precision_of(step.observation.comms.narrowed_to), self.precision, in_double)))
        if not precision:
            return None
        apart = tuple(each(part, lambda tensor: moved_tensor(tensor, precision)) for part in setting.batch)
        model = self.mode(moved(setting.build(), precision))
        return stepped(probe, model, apart, self.parts, self.dim, self.step.observation.trace.followed)

    def clipped(self, step: StepResult, probe: ModuleType, batch: Batch) -> UnshardedStep:
        """Clip its gradients as the sharded step clipped its own. Every rank calls this."""
        clips = () if self.has_own_loss else agreed_clips(step.clips, self.model)
        models = [self.model, *(step.model for step in (self.whole, self.moved) if step is not None)]
        for clip, model in product(clips, models):
            clip.apply(model)
        logged = logged_by(probe, self.model, batch, self.step.loss) if clips else self.step.logged
        return replace(self, step=replace(self.step, logged=logged))

    def compared_with(
        self, step: StepResult, judge: Callable[[UnshardedStep], StepAnswer], groups: Iterable[tuple[int, ...]]
    ) -> UnshardedStep:
        """Return the reference whose mean loss equals the sharded step's. Every rank calls this.

        If neither does, it is the one whose loss is a whole number of times as large or as small, as if ranks counted
        rows several times. If neither is, it is the one whose modules agree with the sharded step's for longer; if both
        do for as long, the whole batch's if modules exchange numbers over the ranks that share it out.

        Args:
            groups: The ranks that share the batch out, along each of its axes.
        """
        of_all = of_all_ranks((self.whole is not None, float(whole_of(step.loss))))
        if self.whole is None or not all(has_parts for has_parts, _ in of_all):
            return self.whole or self  # a forward that asks for its rank may give a rank another reference
        losses = [loss for _, loss in of_all]
        near = max(precision_of(step.observation.comms.narrowed_to), self.whole.precision)
        mean = sum(losses) / len(losses)
        references = (self.whole, self)
        for is_near in (_equal, _is_multiple):
            for reference in references:
                if is_near(mean, float(reference.step.loss), near):
                    return reference
        of_parts, of_whole = (judge(reference).num_right for reference in (self, self.whole))
        exchanged = [set(ranks) for ranks in step.observation.comms.exchanged]
        is_shared = any({*group} <= ranks for group in groups for ranks in exchanged if len(group) > 1)
        is_of_whole = any(of_all_ranks(is_shared))
        return self.whole if of_whole > of_parts or (of_whole == of_parts and is_of_whole) else self

    def mode(self, model: nn.Module) -> nn.Module:
        """Put another model into the mode in which this one was stepped."""
        return model if self.training else model.eval()


@one_process()
def reference_of(probe: ModuleType, setting: Setting, followed: Followed = NONE) -> UnshardedStep:
    """Step the unsharded model."""
    reference = stepped(probe, setting.build(), setting.batch, followed=followed)
    if reference.draws:
        reference = replace(
            stepped(probe, setting.build().eval(), setting.batch, followed=followed),
            training=False,
            notes=(f"{DRAWS}; compared in eval()",),
        )
    if reference.draws:
        return replace(reference, notes=(DRAWS_IN_EVAL,))
    return reference if setting.parts == 1 else _in_parts(probe, setting, reference)


@one_process()
def stepped(
    probe: ModuleType, model: nn.Module, batch: Batch, parts: int = 1, dim: int = 0, followed: Followed = NONE
) -> UnshardedStep:
    """Step a model on each part of a batch from the same buffers; the loss is their mean."""
    before = tuple(replace(local, values=local.values.clone()) for local in local_tensors(model))
    torch.manual_seed(2)
    states = random_states()
    losses = []
    restore = _buffers_of(model)
    with observed(model, followed=followed) as observation:
        for number in range(parts):
            restore()
            loss = loss_of(probe, model, part_of(batch, number, parts, dim)) / parts
            torch.autograd.backward(loss)
            losses.append(loss.detach())
    draws = any(
        not torch.equal(before_state, after_state)
        for before_state, after_state in zip(states, random_states(), strict=False)
    )
    outputs = [output for output in observation.outputs if output.ndim]
    returned, sizes = tuple(observation.returned), sizes_of(part_of(batch, 0, parts, dim))
    of_part = returned[: len(returned) // parts]
    turns = len(of_part) if dim == 0 and sizes and are_parts_of(of_part, sizes[0]) else 1
    runs = max(len(outputs) // parts // turns, 1)
    output = None if not outputs else torch.cat(outputs, dim) if parts * turns > 1 else outputs[-1]
    loss = torch.stack(losses).sum()
    logged = logged_by(probe, model, batch, loss)
    step = StepResult(loss, output, logged, observation, runs, sizes_of(batch), returned=returned)
    return UnshardedStep(model, before, step, draws=draws, parts=parts, dim=dim, turns=turns)


def _buffers_of(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores the model's current buffers, which a forward may advance."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.layout is torch.strided and not buffer.is_meta
    ]

    @torch.no_grad()
    def restore() -> None:
        for module, name, buffer, values in saved:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            if not torch.equal(buffer, values):
                buffer.copy_(values)

    return restore


def _in_parts(probe: ModuleType, setting: Setting, whole: UnshardedStep) -> UnshardedStep:
    """Return the reference over the ranks' parts if it differs from the whole batch's.

    A probe's own step may count rows as it likes: it is compared over the parts only if rows are not independent. If a
    rank's rows are too few for the model, as for a `topk` over rows, only the whole batch's can be meant.
    """
    try:
        losses, outputs = _run_in_parts(probe, whole.mode(setting.build()), setting)
    except Exception:  # what the model's own code raises
        return whole
    mean, loss, near = sum(losses) / setting.parts, float(whole.step.loss), whole.precision
    independent = _are_alike(outputs, whole.step.output, near)
    if _equal(mean, loss, near) or (hasattr(probe, "step") and independent is not False):
        return whole
    model, followed = whole.mode(setting.build()), whole.step.observation.trace.followed
    reference = stepped(probe, model, setting.batch, setting.parts, setting.dim, followed)
    reference = replace(reference, training=whole.training, notes=whole.notes, whole=whole)
    if (
        independent
        and min(losses) <= loss <= max(losses)
        and is_weighted_mean(probe, replace(setting, build=lambda: whole.mode(setting.build())), near)
    ):
        return replace(reference, is_mean_of_means=True)
    note = (
        f"{COMPARED_OVER_PARTS}: its loss is {loss:.6g}, but the mean over the ranks' {setting.parts} parts is "
        f"{mean:.6g} ({why_apart(reference.model, independent)}); compared over the parts"
    )
    if any(True for _ in reference.model.buffers()):
        note += ", without the buffers after the step: each rank's are of its own part"
    return replace(reference, notes=(*whole.notes, note))


def _run_in_parts(probe: ModuleType, model: nn.Module, setting: Setting) -> tuple[list[float], torch.Tensor | None]:
    """Return the parts' losses, and the outputs of all parts, joined if there are any."""
    restore, losses, outputs = _buffers_of(model), [], []
    for number in range(setting.parts):
        restore()
        with observed(model) as observation:
            losses.append(float(loss_of(probe, model, part_of(setting.batch, number, setting.parts, setting.dim))))
        outputs += [output for output in observation.outputs if output.ndim][-1:]
    is_all = len(outputs) == setting.parts
    joined = torch.cat(outputs, setting.dim if outputs[0].ndim > setting.dim else 0) if is_all else None
    return losses, joined


def _are_alike(parts: torch.Tensor | None, whole: torch.Tensor | None, precision: float) -> bool | None:
    """Whether the parts' outputs equal the whole batch's: rows are independent; or None."""
    if parts is None or whole is None or parts.shape != whole.shape:
        return None
    allowed = max(LOSS_IN_FLOAT64, ROUNDINGS_OF_STEP * precision) * max(
        float(whole.abs().max()) if whole.numel() else 0.0, 1e-30
    )
    return bool(((parts - whole).abs() <= allowed).all())


def _equal(loss: float, whole: float, precision: float) -> bool:
    return abs(loss - whole) <= max(LOSS_IN_FLOAT64, ROUNDINGS_OF_STEP * precision) * max(abs(whole), 1e-30)


def _is_multiple(loss: float, whole: float, precision: float) -> bool:
    """Whether a loss is a whole number of times as large as another one, or as small: a number of ranks at most."""
    smaller, larger = sorted((abs(loss), abs(whole)))
    times = round(larger / smaller) if smaller > 0 else 0
    return 1 < times <= torch.distributed.get_world_size() and _equal(times * smaller, larger, precision)


def _largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the size of the largest element of all tensors."""
    dense = [tensor.detach().to_dense() for tensor in tensors if tensor is not None and tensor.numel()]
    sizes = [(one.float() if one.itemsize == 1 else one).abs().max() for one in dense]  # float8 has no max
    return max(map(float, sizes), default=0.0)


def precision_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative precision of the narrowest dtype; 0 without any, as in float64 throughout."""
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


SEED = 3


def moved(model: nn.Module, precision: float) -> nn.Module:
    """Move a model's weights by a random relative error, and return it."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(moved_tensor(parameter, precision, generator))
    return model


def moved_tensor(tensor: torch.Tensor, precision: float, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a tensor of floating point with every element moved by a random part of a relative precision."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(SEED) if generator is None else generator
    direction = torch.rand(tensor.shape, generator=generator, dtype=torch.float32) * 2 - 1
    return (tensor.detach().double() * (1 + precision * direction.to(tensor.device).double())).to(tensor.dtype)


def noise_of(reference: UnshardedStep, moved_step: UnshardedStep) -> Iterator[NoiseRecord]:
    """Yield how far the results of two steps of the unsharded model are apart."""
    others = {local.name: local.grad for local in local_tensors(moved_step.model) if local.role == "param"}
    for local in local_tensors(reference.model):
        grad = others.get(local.name)
        if local.role == "param" and local.grad is not None and grad is not None:
            yield _between("grad", local.name, local.grad, grad)
    yield _between("scalar", "loss", reference.step.loss, moved_step.step.loss)
    outputs = reference.step.output, moved_step.step.output
    if outputs[0] is not None and outputs[1] is not None and outputs[0].shape == outputs[1].shape:
        yield _between("output", "output", outputs[0], outputs[1])
    moved_outputs = wanted_outputs(moved_step)
    for name, output in wanted_outputs(reference).items():
        if name in moved_outputs and moved_outputs[name].whole.shape == output.whole.shape:
            yield _between("output", name, output.whole, moved_outputs[name].whole)


def _between(role: Role, name: str, first: torch.Tensor, second: torch.Tensor) -> NoiseRecord:
    first, second = first.detach().double(), second.detach().double()
    if not first.numel():
        return NoiseRecord(role, name, 0.0, 0.0)
    apart = (first - second).abs()
    sizes = float(apart.max()), float(apart.square().mean().sqrt())
    return NoiseRecord(role, name, *(number if number < float("inf") else 0.0 for number in sizes))


def add_replayed(capture: Capture, judge: StepJudge, reference: UnshardedStep) -> None:
    """Record, of a step in narrow numbers, the gradients that the sharded modules' own activations make.

    In narrow numbers two right steps drift apart from layer to layer, so that a gradient that is off by a hundredth
    does not show beside the unsharded model's. It does beside this: the unsharded module, run in float64 on what all
    ranks together gave the sharded one, and on the gradient that came back. Only the rounding of the gradient itself
    is left.

    Modules without modules in them that are called once are run again, if that makes the unsharded step's own
    gradients.
    """
    modules = ((name, module) for name, module in reference.model.named_modules() if name)
    leaves = {clean_name(name): one for name, one in modules if not [*one.children()] and [*one.parameters()]}
    weights = {local.name: local for local in reference.before if local.role == "param"}
    for name, sharded, unsharded in judge.sides(list(leaves)):
        for weight, gradient in _of_module(name, leaves[name], weights, sharded, unsharded):
            local = Local(of_replay(weight), "activation", tuple(gradient.shape), gradient.float())
            capture.add_values(local, "reference")


def _of_module(
    name: str, module: nn.Module, weights: Mapping[str, Local], sharded: Sides, unsharded: Sides
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's replayed gradients if replaying the unsharded step gives its own."""
    reference = _gradients(name, module, weights, unsharded)
    expected = _gradients(name, module, weights, sharded) if reference else {}
    for weight, gradient in reference.items():
        local = dict(module.named_parameters())[weight.removeprefix(f"{name}.")].grad
        if local is not None and weight in expected:
            factor = factor_of(local.detach().double().cpu().numpy(), gradient.double().cpu().numpy())
            if factor is not None and abs(factor - 1) <= LEAST_FACTOR:
                yield weight, expected[weight]


def _gradients(name: str, module: nn.Module, weights: Mapping[str, Local], sides: Sides) -> dict[str, torch.Tensor]:
    """Run a module in float64, with its weights before the step; return nothing if that cannot be done."""
    if any(f"{name}.{own}" not in weights for own, _ in module.named_parameters()):
        return {}
    try:
        again = deepcopy(module).cpu().double()
    except (TypeError, RuntimeError, PicklingError):  # it has something that cannot be copied
        return {}
    with torch.no_grad():
        for weight_name, parameter in again.named_parameters():
            parameter.copy_(weights[f"{name}.{weight_name}"].values)
            parameter.grad = None
    if not _runs_back(again, sides):
        return {}
    by_weight = {f"{name}.{own}": one.grad for own, one in again.named_parameters() if one.grad is not None}
    return {weight: gradient for weight, gradient in by_weight.items() if bool(gradient.isfinite().all())}


def _runs_back(module: nn.Module, sides: Sides) -> bool:
    """Run a module forward and backward; whether it could be run by its first input alone."""
    try:
        inputs, back = map(torch.tensor, sides)
        output = module(inputs)
        if torch.is_tensor(output) and output.shape == back.shape:
            torch.autograd.backward(output, back)
            return True
    except Exception:  # a module of a user's own may raise anything where it is called otherwise than by its model
        return False
    return False
