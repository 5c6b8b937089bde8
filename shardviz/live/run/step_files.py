"""What a rank writes of a step of a job: weights before and after it, gradients, what modules took and returned."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING

import torch
from msgspec import structs
from torch import distributed, nn

from shardviz.dump.arrays import kept_indices, strides_for
from shardviz.dump.write import write_rank, write_run
from shardviz.layout.mesh import AXIS_NAME
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.claims import masters
from shardviz.live.claims.registry import held_back_names, local_tensors, locals_of, unwrapped
from shardviz.live.claims.wrappers import approximated_by, reduced_in, reducing, rounded_to
from shardviz.live.compat.modules import clean_name, is_compiled
from shardviz.live.compat.worlds import default_store, groups_here
from shardviz.live.run.hooks.observing import quietly
from shardviz.live.run.references.values import is_first_here, rank_here
from shardviz.live.step.module_recorder import MAX_ELEMENTS, add_points
from shardviz.live.step.observe import optimizer_states
from shardviz.live.step.steppers import Options as Settings
from shardviz.live.step.steppers import options_records

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from shardviz.dump.records.step import ClipRecord, GivenRecord
    from shardviz.live.claims.local import Local
    from shardviz.live.lines.job_lines import JobLines
    from shardviz.live.run.job_trace import JobTrace
    from shardviz.live.run.outside import Averages, Outside
    from shardviz.live.run.read_buffers import ReadBuffers

    Written = Callable[[Iterable[Local], Iterable[Local], Iterable[GivenRecord]], None]

WHAT = "the trace of a step"

FEWEST, MOST = 1 << 10, 1 << 18
"""Of a tensor at least and at most so many elements are kept, as many as leaves room for every module."""

COMPILED = (
    "what modules take and return inside torch.compile, whose graph has no modules; run the job with "
    "TORCH_COMPILE_DISABLE=1 to record them"
)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is being followed.

    Attributes:
        root: The model as the job calls it.
        trace: What its modules were given and returned.
        number: Which optimizer step it is, counted from 1.
        most: Of each weight and its gradient no more elements are kept.
        weights: This rank's part of the weights before the step, and of what may be averages of them.
        outside: What is stepped with the model and is not in it.
        buffers: Those that its forward reads or writes.
        kept: Parameters that still have the gradient of the step before as backward begins.
        broke_off: Whether the job raised in it: what backward left in gradients may not be reduced yet.
        lines: What was recorded line by line; None if nothing was asked for.
        options: The numbers with which optimizers step its parameters.
        apart: Modules with gradients that are no part of it, each with the optimizer that steps it.
        clips: The norms by which its gradients were clipped.
        optimizers: What steps its parameters, once backward is over.
        averages: What may be averages of its weights.
        gradients: Copies of this rank's part of gradients, if a library steps other tensors in parameters' place.
        unknown: Why one of these is not understood, by the parameter's name.
        copied: Parameters in whose place copies are stepped, and of each whether its copies have other values.
    """

    root: nn.Module
    trace: JobTrace
    number: int
    most: int
    weights: Sequence[Local]
    outside: Outside
    buffers: ReadBuffers
    kept: list[str] = field(default_factory=list)
    broke_off: bool = False
    lines: JobLines | None = None
    options: Settings = field(default_factory=dict)
    apart: Sequence[tuple[str, str]] = ()
    clips: list[ClipRecord] = field(default_factory=list)
    optimizers: Sequence[Optimizer] = ()
    averages: Averages | None = None
    gradients: Sequence[Local] | None = None
    unknown: dict[str, str] = field(default_factory=dict)
    copied: dict[str, bool] = field(default_factory=dict)

    @property
    def is_compiled(self) -> bool:
        """Whether modules of it are in a compiled graph, which calls no hook."""
        return any(map(is_compiled, self.root.modules()))


MAX_WORD = 24
"""A word that is a setting of a module has at most so many characters."""


def weights_of(tensors: Iterable[Local], most: int) -> list[Local]:
    """Return copies of a model's parameters, of large ones a sample."""
    return [
        replace(local, values=sampled(local.values, most), grad=None)
        for local in tensors
        if local.role == "param" and not local.values.is_meta
    ]


def write_step(step: Step, folder: Path, command: tuple[str, ...], problem: str = "") -> Written:
    """Write this rank's file, and on the first rank of each disk that of the run.

    Args:
        problem: Why the step has no end; empty if it has one.

    Returns:
        A function that writes this rank's file again, with weights after the optimizer's step, those that the next
        step begins with other values of, and what that step and those after it were given.
    """
    rank, num_ranks = rank_here(), distributed.get_world_size() if distributed.is_initialized() else 1
    capture = Capture(rank, num_ranks, run_id=_run_id(), steps_before=step.number - 1)
    capture.wrappers = [*reducing(step.root), *step.outside.wrappers()]
    if step.trace.uncalled:
        capture.wrappers = [
            structs.replace(wrapper, kind="bypassed") if wrapper.kind != "fsdp" else wrapper
            for wrapper in capture.wrappers
        ]
    capture.narrowed_to |= reduced_in(step.root) | rounded_to(step.root)
    hook = approximated_by(step.root)
    gradients = gradients_of(step) if step.gradients is None else step.gradients
    for local in (*step.weights, *step.buffers.before, *(() if step.broke_off or hook else gradients)):
        capture.add_values(local, "step")
    quietly(WHAT, _add_states, capture, step)
    add_points(capture, step.trace)
    capture.options, capture.clips = options_records(step.options), step.clips
    capture.held_back = [] if problem else held_back_names(unwrapped(step.root))
    capture.kept_gradients = step.kept
    capture.stepped_copies = list(step.copied)
    capture.stale_copies = [name for name, is_stale in step.copied.items() if is_stale]
    capture.module_settings = quietly(WHAT, _module_settings, unwrapped(step.root), step.trace.types) or {}
    capture.written_buffers, capture.read_buffers = list(step.buffers.written.items()), step.buffers.carried
    capture.kept_buffers, capture.buffers_beside = step.buffers.kept, step.buffers.beside
    if step.lines is not None:
        quietly(WHAT, step.lines.add_to, capture)
    for name, ranks in groups_of(num_ranks):
        capture.add_group(name, ranks)
    capture.not_checked += [*step.unknown.items(), *(("", why) for why in _unseen(step, problem, hook))]
    folder.mkdir(exist_ok=True)
    if is_first_here(folder, "trace folder"):
        write_run(folder, run_record(num_ranks, None, command, run_id=capture.run_id))
    write_rank(folder, capture.record(), capture.dense)

    def written_again(after: Iterable[Local], changed: Iterable[Local], given: Iterable[GivenRecord]) -> None:
        for local in after:
            capture.add_values(local, "updated")
        for local in changed:
            capture.add_values(local, "next")
        capture.given = list(given)
        write_rank(folder, capture.record(), capture.dense)

    return written_again


def _module_settings(model: nn.Module, names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the numbers, flags, words and functions that modules have as attributes, by module."""
    modules = ((clean_name(name), module) for name, module in model.named_modules())
    settings = {name: vars(module).items() for name, module in modules if name in names}
    return {
        name: {key: text for key, value in of_module if not key.startswith("_") and (text := _text_of(value))}
        for name, of_module in settings.items()
    }


def _text_of(value: object) -> str:
    """Return a module's attribute as text; empty if it is a container, a tensor or another object."""
    if value is None or isinstance(value, bool | int | float | torch.dtype):
        return str(value)
    if isinstance(value, str):
        return value if value.isidentifier() and len(value) <= MAX_WORD else ""  # no path, and no key to a service
    return str(getattr(value, "__name__", "")) if isinstance(value, FunctionType | BuiltinFunctionType) else ""


def _unseen(step: Step, problem: str, hook: str) -> Iterator[str]:
    """Yield what of a step was not seen, and why."""
    if problem:
        what = "the end of the step and the gradients of weights" if step.broke_off else "the end of the step"
        yield f"{what}: {problem}"
    for name, optimizer in step.apart:
        yield f"{name}, which {optimizer} steps: it is no part of the model that is followed"
    if hook:
        yield f"the gradients of weights: {hook} sends an approximation of them"
    if step.trace.left_out:
        yield step.trace.left_out
    if step.is_compiled:
        yield COMPILED


def groups_of(num_ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield this rank's groups that are smaller than the job, each with an axis's name."""
    for name, ranks in groups_here() if distributed.is_initialized() else ():
        axis = name.removeprefix("mesh_")
        if len(ranks) < num_ranks:
            yield axis if AXIS_NAME.fullmatch(axis) and axis != "undefined" else f"groups_of_{len(ranks)}", ranks


def _run_id() -> str:
    """Return the run's id, which the first rank to ask puts into the job's store."""
    run_id = secrets.token_hex(8)
    if distributed.is_initialized():
        with suppress(RuntimeError):
            return str(default_store().compare_set("shardviz/trace", "", run_id).decode())
    return run_id


def gradients_of(step: Step, instead: Collection[str] = ()) -> Iterator[Local]:
    """Yield copies of this rank's part of gradients, of large ones a sample.

    Args:
        instead: Parameters in whose place something else is stepped: what is in their `.grad` is not what that gets.
    """
    for local in (*local_tensors(unwrapped(step.root)), *step.outside.tensors()):
        if local.role == "param" and local.grad is not None and local.name not in instead:
            claim = local.grad_claim or local.claim
            values = sampled(local.grad.detach(), step.most)
            yield replace(local, role="grad", values=values, grad=None, claim=claim)


def _add_states(capture: Capture, step: Step) -> None:
    """Add what optimizers keep of each element of a parameter before the step: one that made none keeps nothing."""
    model = unwrapped(step.root)
    params = [local for local in local_tensors(model) if local.role == "param"]
    shapes = {local.name: local.values.shape for local in params}
    weights = locals_of(model)
    for optimizer in step.optimizers:
        for state in masters.states(weights, getattr(optimizer, "optim", optimizer).state):
            capture.add_values(replace(state, values=sampled(state.values.detach(), step.most)), "step")
        for state in optimizer_states(optimizer, model, params):
            is_of_elements = state.values.shape == shapes.get(state.name.rpartition(".")[0])
            # What is quantized has codes, or is of a class of its own.
            if is_of_elements and type(state.values) is torch.Tensor and state.values.is_floating_point():
                capture.add_values(replace(state, values=sampled(state.values.detach(), step.most)), "step")


def most_of(num_tensors: int) -> int:
    """Return the elements kept of each of several tensors: a power of 2 that bounds the total."""
    room = MAX_ELEMENTS // max(num_tensors, 1)
    return min(max(1 << max(room.bit_length() - 1, 0), FEWEST), MOST)


def sampled(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a copy of a tensor, or of a sample of a larger one."""
    strides = strides_for(tensor.shape, most)
    parts = tuple(
        slice(kept_indices(size, stride).start, None, stride)
        for size, stride in zip(tensor.shape, strides, strict=True)
    )
    return tensor[parts].clone() if parts else tensor.clone()
