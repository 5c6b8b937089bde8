"""The lines of one step of a job: of one module, and of the script around the model.

The job's own step is recorded while it runs. What watches it may not break it: an error here is reported and goes no
further, and nothing begins or ends inside of a `torch` mode of the job's, whose end would take another mode away.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from shardviz.dump.records.trace import STEP
from shardviz.live.claims.registry import name_of, unwrapped
from shardviz.live.compat.modules import clean_name, innermost_modes
from shardviz.live.lines.recorder import recording
from shardviz.live.lines.rerun import add_values, record_of, with_own_lines
from shardviz.live.lines.step_recorder import StepRecorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    from shardviz.live.capture.capture import Capture
    from shardviz.live.lines.recorder import Recorder

    OpenCall = tuple[nn.Module, Any, AbstractContextManager[None]]


class JobLines:
    """Records the lines of a step.

    Args:
        module: The module whose lines are recorded; empty for the model itself.
        report: Says why nothing was recorded.
    """

    def __init__(self, module: str, report: Callable[[str], None]) -> None:
        self._asked, self._report = module, report
        self._module = module
        self._around = StepRecorder(None)
        self._around.guarded = self._guarded
        self._model: nn.Module | None = None
        self._inside: Recorder | None = None
        self._modes, self._hooks = ExitStack(), ExitStack()
        self._on: tuple[Any, Any] | None = None
        self._open: list[OpenCall] = []
        os.register_at_fork(after_in_child=self._around.stop)  # a worker that loads data

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a recorder's; once one fails nothing more is recorded."""
        try:
            return function(*args)
        except Exception as error:
            self._around.stop()
            if self._inside is not None:
                self._inside.stop()
            self._report(f"lines of the step are not recorded: {type(error).__name__}: {error}")
            return None

    def begin(self) -> None:
        """Record what the script calls from now on."""
        if self._on is None and innermost_modes() == (None, None):
            self._modes.enter_context(self._around.watching())
            self._on = innermost_modes()

    def follow(self, root: nn.Module) -> None:
        """Record the module's calls of a model, and take each call of the model as one."""
        self.begin()
        self._around.meet(root)
        self._model = unwrapped(root)
        self._module = with_own_lines(self._model, self._asked)
        if self._module not in {clean_name(name) for name, _ in self._model.named_modules()}:
            self._report(f"--trace lines={self._asked}: the model has no module of that name")
        self._inside = self._hooks.enter_context(recording(root, self._module, self._guarded))
        for module in root.modules() if self._on is not None else ():
            enter = module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            leave = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            self._hooks.callback(enter.remove)
            self._hooks.callback(leave.remove)

    def _enter(self, module: nn.Module, inputs: Any, named: Any) -> None:
        is_outermost, quiet = not self._around.is_inside, self._around.quiet()
        quiet.__enter__()
        before = self._guarded(self._around.before, (inputs, named)) if is_outermost else None
        self._open.append((module, before, quiet))

    def _leave(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        before = None
        while any(opened is module for opened, *_ in self._open):
            opened, before, quiet = self._open.pop()
            quiet.__exit__(None, None, None)
            if opened is module:
                break
        if before is not None and output is not None:
            with self._around.quiet():
                self._guarded(self._note, module, before, (inputs, named), output)

    def _note(self, module: nn.Module, before: Any, given: Any, output: Any) -> None:
        self._around.after(name_of(module), before, given, output)
        self._around.note_output(output)

    def end(self) -> None:
        """Record no more."""
        self._hooks.close()
        with self._around.quiet():
            self._guarded(self._around.end_backward)
        self._around.stop()
        if self._on is not None and innermost_modes() == self._on:
            self._modes.close()

    def add_to(self, capture: Capture) -> None:
        """Add what was recorded."""
        around = self._around
        runs = [event for event in around.events if event.function == "backward"]
        if len(runs) == 1 and len(runs[0].inputs) == 1:
            around.results["loss"] = runs[0].inputs[0]
        if self._model is not None:
            self._guarded(capture.add_ties, self._model)
        for module, asked, recorder in ((self._module, self._asked, self._inside), (STEP, STEP, around)):
            if recorder is not None and recorder.events:
                add_values(capture, module, recorder, "step")
                capture.lines.append(record_of(module, asked, recorder))
