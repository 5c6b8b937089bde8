"""Run the step again for the lines of one module, if the judge asks for them after the step."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.dump.records.lines import LinesRecord, of_value
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.locals import Local
from shardviz.live.lines.recorder import recording

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from shardviz.dump.records.base import Moment
    from shardviz.live.capture.capture import Capture
    from shardviz.live.lines.recorder import Recorder


@dataclass(frozen=True)
class Again:
    """The step, to be run once more as it ran.

    Attributes:
        sharded: Builds and shards the model and puts it into the step's mode.
        step: Steps it, and returns why it cannot.
        unsharded: Builds the unsharded model in that mode.
        step_unsharded: Steps that.
        with_gradients: Whether both steps have the same loss.
    """

    sharded: Callable[[], nn.Module]
    step: Callable[[nn.Module], str]
    unsharded: Callable[[], nn.Module]
    step_unsharded: Callable[[nn.Module], object]
    with_gradients: bool = True

    def add_lines(self, capture: Capture, module: str) -> None:
        """Record the calls inside of a module. Every rank calls this.

        Args:
            capture: This rank's.
            module: The module's name; empty for the model itself. Of torch's own modules the one around them is taken,
                which has lines of the user's.
        """
        whole_model, asked_module = self.unsharded(), module
        module = _with_own_lines(whole_model, module)
        model = self.sharded()
        with recording(model, module) as recorder:
            why = self.step(model)
        _add_values(capture, module, recorder, "step")
        capture.lines.append(_record(module, asked_module, recorder, why=why))
        with recording(whole_model, module) as whole:
            self.step_unsharded(whole_model)
        if capture.rank == 0:
            _add_values(capture, module, whole, "reference", with_gradients=self.with_gradients)
            capture.lines.append(_record(module, asked_module, whole, is_unsharded=True))


def _with_own_lines(model: nn.Module, name: str) -> str:
    """Return the name of a module, or of the nearest around it that is not one of torch's own."""
    modules = dict(model.named_modules())
    while name and type(modules.get(name)).__module__.startswith("torch."):
        name = name.rpartition(".")[0]
    return name


def module_asked_for(question: str, folder: Path, rank: int) -> str | None:
    """Return the module whose lines the judge wants to see; None if there is none. Every rank calls this.

    Args:
        question: "package.module:function", called on rank 0 with the dump's folder: the judge imports no torch, and is
            not imported here.
        folder: The folder, which all ranks have written to.
        rank: This rank.
    """
    of_all_ranks(None)
    module, _, name = question.partition(":")
    asked_module = None
    if rank == 0:
        with suppress(Exception):  # the command that reads the dump raises it again; the other ranks wait here
            asked_module = getattr(importlib.import_module(module), name)(folder)
    answer: str | None = of_all_ranks(asked_module)[0]
    return answer


def _record(
    module: str, asked_module: str, recorder: Recorder, *, is_unsharded: bool = False, why: str = ""
) -> LinesRecord:
    lines = tuple(event.record() for event in recorder.events)
    values = tuple(value.record() for value in recorder.values)
    return LinesRecord(module, lines, values, tuple(recorder.returned), is_unsharded, why, asked_module)


def _add_values(
    capture: Capture, module: str, recorder: Recorder, moment: Moment, *, with_gradients: bool = True
) -> None:
    for value in recorder.values:
        sides = ((value.values, False), (value.back if with_gradients else None, True))
        for numbers, is_gradient in sides:
            if numbers is not None:
                name = of_value(module, value.number, gradient=is_gradient)
                capture.add_values(Local(name, "activation", tuple(numbers.shape), numbers), moment)
