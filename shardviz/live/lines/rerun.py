"""Run the step again for lines, of one module or around the model, if the judge asks for them after the step.

Lines are looked at only if the loss, a gradient or a weight may differ from the unsharded model's.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records.trace import STEP, LinesRecord, of_value
from shardviz.layout.layout import Layout
from shardviz.live.capture.agreement import attempted, of_all_ranks
from shardviz.live.claims.local import Local
from shardviz.live.claims.registry import class_of
from shardviz.live.compat.meshes import whole_of
from shardviz.live.compat.modules import clean_name
from shardviz.live.lines.recorder import recording
from shardviz.live.lines.step_recorder import StepRecorder, is_recordable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    from torch import nn

    from shardviz.dump.records.base import Moment
    from shardviz.live.capture.capture import Capture
    from shardviz.live.lines.recorder import Recorder


POINT_TO_POINT = ("send", "recv")
"""What a rank alone would wait for, forever."""


@dataclass(frozen=True)
class Side:
    """One way to run the step once more.

    Attributes:
        build: Builds the model, shards it if it is sharded, and puts it into the step's mode.
        step: Steps it with a probe's functions, and returns why it cannot.
        update: Lets the probe's optimizer step it, and returns why it cannot; None without an optimizer.
    """

    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, Any], str]
    update: Callable[[nn.Module, StepRecorder], str] | None = None


@dataclass(frozen=True)
class Again:
    """The step, to be run once more as it ran.

    Attributes:
        alone: The probe's own step on a mesh of this rank alone: it runs the sharded step's lines on whole tensors.
        with_gradients: Whether the first two have the same loss.
        is_of_parts: Whether the unsharded model is stepped on parts of the batch, one after the other.
        by_calls: Steps the unsharded model, each call on the rows of the sharded model's; None if that cannot be.
        is_beside_parts: Whether the step was compared over the parts of the batch, whose gradients `by_calls` has not.
    """

    probe: ModuleType
    sharded: Side
    unsharded: Side
    alone: Side
    with_gradients: bool = True
    is_of_parts: bool = False
    by_calls: Callable[[nn.Module, Any], str] | None = None
    is_beside_parts: bool = False

    def add_lines(self, capture: Capture, module: str) -> None:
        """Record the calls inside of a module, or around the model. Every rank calls this."""
        if module == STEP:
            _, failed = attempted(lambda: self._add_step(capture), "lines around the model")
            if failed.text:
                capture.lines = [lines for lines in capture.lines if lines.module != STEP]
        elif self.by_calls is not None:
            self._add_module(capture, module, self.by_calls)

    def _add_step(self, capture: Capture) -> None:
        """Record the calls of the loss, of the step and of the optimizer."""
        if self.is_of_parts or not self.with_gradients:
            return
        sharded, why = self._recorded(self.sharded)
        whole, failed = self._recorded(self.unsharded, is_unsharded=True)
        if sharded is None or whole is None or failed:
            return
        answers = not any(call.op in POINT_TO_POINT for call in capture.collectives)
        run = partial(self._recorded, self.alone, is_alone=True) if answers else lambda: (None, "")
        alone, _ = attempted(run, "lines of one rank")
        if alone is not None and alone[0] is not None and not alone[1] and alone[0].equals(whole):
            whole = alone[0]
        for recorder, is_unsharded in ((sharded, False), (whole, True)):
            if capture.rank == 0 or not is_unsharded:
                add_values(capture, STEP, recorder, "reference" if is_unsharded else "step")
                reason = "" if is_unsharded else why
                capture.lines.append(record_of(STEP, STEP, recorder, is_unsharded=is_unsharded, why=reason))

    def _recorded(
        self, side: Side, *, is_unsharded: bool = False, is_alone: bool = False
    ) -> tuple[StepRecorder | None, str]:
        """Run a step and record it; return why it could not be run to its end."""
        model = side.build()
        if not is_recordable(model):
            return None, ""
        recorder = StepRecorder(model, is_unsharded=is_unsharded, is_alone=is_alone)
        why = side.step(model, recorder.probe(self.probe))
        recorder.end_backward()
        if side.update is not None and not why:
            why = side.update(model, recorder)
        return recorder, why

    def _add_module(self, capture: Capture, module: str, step_unsharded: Callable[[nn.Module, Any], str]) -> None:
        """Record the calls inside of a module.

        Args:
            module: The module's name; empty for the model itself. Of torch's own modules the one around them is taken,
                which has lines of the user's.
        """
        whole_model, asked_module = self.unsharded.build(), module
        module = with_own_lines(whole_model, module)
        if any(lines.module == module for lines in capture.lines):
            return
        model = self.sharded.build()
        with recording(model, module, is_alone=True) as recorder:
            why = self.sharded.step(model, self.probe)
        add_values(capture, module, recorder, "step")
        capture.lines.append(record_of(module, asked_module, recorder, why=why))
        with recording(whole_model, module, is_alone=True) as whole:
            step_unsharded(whole_model, self.probe)
        if capture.rank == 0:
            has_gradients = self.with_gradients and not self.is_beside_parts
            add_values(capture, module, whole, "reference", with_gradients=has_gradients)
            capture.lines.append(record_of(module, asked_module, whole, is_unsharded=True))


def with_own_lines(model: nn.Module, name: str) -> str:
    """Return the name of a module, or of the nearest around it that is not one of torch's own."""
    modules = {clean_name(known): module for known, module in model.named_modules()}  # what is wrapped, not its wrapper
    while name and name in modules and class_of(modules[name]).__module__.startswith("torch."):
        name = name.rpartition(".")[0]
    return name


def modules_asked_for(question: str, folder: Path, rank: int) -> Sequence[str]:
    """Return the modules whose lines the judge wants to see, `STEP` for those around the model. Every rank calls this.

    Args:
        question: "package.module:function", called on rank 0 with the dump's folder: the judge imports no torch, and is
            not imported here.
    """
    of_all_ranks(None)
    module, _, name = question.partition(":")
    asked_modules: Sequence[str] = ()
    if rank == 0:
        with suppress(Exception):  # the command that reads the dump raises it again; the other ranks wait here
            asked_modules = getattr(importlib.import_module(module), name)(folder)
    answer: Sequence[str] = of_all_ranks(asked_modules)[0]
    return answer


def record_of(
    module: str, asked_module: str, recorder: Recorder, *, is_unsharded: bool = False, why: str = ""
) -> LinesRecord:
    """Return what was recorded, without its numbers."""
    lines = tuple(event.record() for event in recorder.events)
    values = tuple(value.record() for value in recorder.values)
    sides = is_unsharded, why, asked_module, tuple(recorder.results.items())
    return LinesRecord(module, lines, values, tuple(recorder.returned), *sides)


def add_values(
    capture: Capture, module: str, recorder: Recorder, moment: Moment, *, with_gradients: bool = True
) -> None:
    """Add the numbers of what was recorded."""
    for value in recorder.values:
        sides = ((value.values, False), (value.back if with_gradients else None, True))
        for numbers, is_gradient in sides:
            if numbers is not None:
                name = of_value(module, value.number, gradient=is_gradient)
                capture.add_values(Local(name, "activation", tuple(numbers.shape), numbers), moment)


def differ(
    held: Sequence[Local], wanted: Sequence[Local], losses: tuple[torch.Tensor, torch.Tensor], rank: int, near: float
) -> bool:
    """Return whether anything may differ on any rank, or no rank has a gradient. Every rank calls this.

    What cannot be laid out here, such as a flat parameter, is taken to be equal, and what was cut by hand may be any
    part: this asks whether to look, and the judge decides.

    Args:
        near: By how much of the largest number anything may be off.
    """
    by_name = {(local.role, local.name): local for local in wanted}
    pairs = [(local, by_name.get((local.role, local.name))) for local in held]
    is_here = any(whole is not None and _differs(local, whole, rank, near) for local, whole in pairs)
    named = {local.name for local in held if local.role == "grad"}
    is_flat = any(local.flat for local in held)
    lacking = {name for role, name in by_name if role == "grad" and name not in named and not is_flat}
    of_all = of_all_ranks((is_here, float(whole_of(losses[0])), lacking))
    mean, loss = sum(number for _, number, _ in of_all) / len(of_all), float(losses[1])
    is_lacking = bool(set.intersection(*(lacking for _, _, lacking in of_all)))
    return is_lacking or any(here for here, _, _ in of_all) or not abs(mean - loss) <= near * max(abs(loss), 1e-30)


def _differs(local: Local, whole: Local, rank: int, near: float) -> bool:
    if local.flat or local.values.is_meta or not local.values.is_floating_point() or not local.values.numel():
        return False
    expected, held = whole.values.detach(), local.values.detach()
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    if local.claim is not None:
        mesh, placements = local.claim
        layout = Layout.from_placements(mesh, local.claimed_shape, placements)
        if layout.partial:
            return True  # its sum is the judge's to take
        if layout.shape != tuple(expected.shape):
            return False
        for dim, ranges in enumerate(layout.region_of_rank(rank).dims):
            expected = torch.cat([expected.narrow(dim, begin, end - begin) for begin, end in ranges], dim)
    held = held.to(expected.device)
    parts = [expected] if expected.shape == held.shape else _parts(expected, held.shape)
    return bool(parts) and not any(float((held - part).abs().max()) <= near * largest for part in parts)


def _parts(whole: torch.Tensor, shape: torch.Size) -> Sequence[torch.Tensor]:
    """Return the equal parts of a tensor that have some shape, if one dim alone was cut by hand; else none."""
    dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != shape[dim]] if whole.ndim == len(shape) else []
    if len(dims) != 1 or not shape[dims[0]] or whole.shape[dims[0]] % shape[dims[0]]:
        return ()
    return torch.split(whole, shape[dims[0]], dims[0])
