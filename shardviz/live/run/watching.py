"""`shardviz.watch`: one line in a user's job, for the capture that `shardviz run` makes.

Also as a callback of transformers' Trainer and of Lightning, whose class is made when it is first asked for: it derives
from the library's own.
"""

from __future__ import annotations

import atexit
import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from shardviz.dump.gather import write_around
from shardviz.dump.write import TRACE_FOLDER, prepare_folder
from shardviz.errors import ShardvizError
from shardviz.live.run.hooks.arming import arm, disarm
from shardviz.live.run.hooks.observing import nested, say
from shardviz.live.run.meeting import meet_again
from shardviz.live.run.options import PATIENCE, Options, session_beside
from shardviz.live.run.session import Session
from shardviz.live.run.step_files import Step, write_step
from shardviz.live.run.taking import take
from shardviz.live.run.tracing import Follower, runs
from shardviz.live.trace_modules import NONE, Followed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.live.run.step_files import Written


def watch(
    model: nn.Module,
    path: str | Path,
    *,
    reference: str | Path | None = None,
    reference_names: Mapping[str, str] | None = None,
    force: bool = False,
    patience: float = PATIENCE,
    trace: str = "off",
    trace_step: int = 1,
) -> None:
    """Write a dump of a model before its first call runs. Every rank of the job calls this.

    Nothing of the model is changed. Call it before the model is sharded, so that what its shards hold can be compared
    with what it held; or afterwards with a reference. A capture that cannot be made is reported on stderr by rank 0,
    and the job goes on.

    Args:
        model: The model, sharded or not yet.
        path: As for `capture`.
        reference: As for `capture`; by default the values that the model has now, as far as it is not sharded yet.
        reference_names: As for `capture`.
        force: Replace the folder if it is a dump.
        patience: Seconds that a rank waits for the others to call the model, too.
        trace: Follow one step through these modules, for `shardviz diff` with another job's: `all`,
            `modules=PATTERN` or `off`. A job of one process, which has no weights elsewhere, writes this alone.
        trace_step: Which optimizer step, counted from 1.

    Raises:
        ShardvizError: `trace` is none of these.
        DumpError: Nothing can be written beside the folder.

    Example:
        In a training script, on every rank; afterwards run `shardviz check before_training.shardviz`:

            model = build()
            shardviz.watch(model, "before_training.shardviz")
            parallelize(model, mesh)
    """
    watched = Watch(path, reference, reference_names, force=force, patience=patience)
    watched.begin(model)
    if Followed.parse(trace) != NONE:
        watched.follow(model, trace, trace_step)


class Watch:
    """A model that is captured at its first call."""

    def __init__(
        self,
        path: str | Path,
        reference: str | Path | None = None,
        reference_names: Mapping[str, str] | None = None,
        *,
        force: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        self._folder = Path(path).absolute()
        self._notes = session_beside(self._folder)
        atexit.register(shutil.rmtree, self._notes, ignore_errors=True)  # the model may never be called
        reference_path = str(Path(reference).absolute()) if reference is not None else ""
        options = Options(
            str(self._folder),
            str(self._notes),
            reference_path,
            reference_names or {},
            0,
            force,
            patience,
            tuple(sys.argv),
        )
        self.session = Session(options)
        self._model: nn.Module | None = None

    def begin(self, model: nn.Module) -> None:
        """Wait for the model's first call."""
        self.session.remember(model)
        self._model = model
        arm(self.visit)

    def follow(self, model: nn.Module, trace: str, number: int) -> None:
        """Follow one step of the model, once its weights are captured."""
        options = replace(self.session.options, trace=trace, trace_step=number)
        Follower(options, self._write, model).begin()

    def _write(self, step: Step, problem: str) -> Written | None:
        """Write a step into the dump; into one without weights if there is one process."""
        if not distributed.is_initialized():
            prepare_folder(self._folder, force=self.session.options.force)
        elif not self._folder.is_dir():
            return None  # it could not be captured, as was reported
        trace = self._folder / TRACE_FOLDER
        written = write_step(step, trace, self.session.options.command, problem)
        if not distributed.is_initialized():
            write_around(trace, self._folder)
        return written

    def end(self) -> None:
        """Wait no longer, and remove what was kept."""
        disarm(self.visit)
        shutil.rmtree(self._notes, ignore_errors=True)

    def visit(self, module: nn.Module) -> None:
        """Capture the model before it runs, in any wrapper. Called with every called module."""
        model = self._model
        if model is None or not distributed.is_initialized() or not runs(module, model):
            return
        if any(parameter.is_meta for parameter in model.parameters()):
            return
        self._model = None
        with nested():
            note = take(self.session, model, self._folder)
            if note.kind == "captured":
                # No rank still reads what another one kept. Not a barrier: a rank may be in a collective of the job's.
                meet_again(f"{self._folder}/read", self.session.options.patience)
        if note.kind != "captured" and distributed.get_rank() == 0:
            message, _, hint = note.text.partition("\n")
            say(f"not captured: {message}" + (f"\nHint: {hint}" if hint else ""))
        self.end()


def __getattr__(name: str) -> Any:
    """Return `TrainerCallback` or `LightningCallback`."""
    if name == "TrainerCallback":
        return _trainer_callback()
    if name == "LightningCallback":
        return _lightning_callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _library(name: str, *modules: str) -> Any:
    for module in modules:
        try:
            return import_module(module)
        except ImportError:
            continue
    raise ShardvizError(f"shardviz.{name} needs {modules[0]}, which is not installed", f"pip install {modules[0]}")


class _Callback:
    def __init__(self, path: str | Path, reference: str | Path | None = None, *, force: bool = False) -> None:
        self._watch = Watch(path, reference, force=force)


def _trainer_callback() -> type:
    base: Any = _library("TrainerCallback", "transformers").TrainerCallback

    class TrainerCallback(_Callback, base):  # type: ignore[misc]
        """Captures the Trainer's model before its first step: `callbacks=[TrainerCallback(path)]`."""

        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            """Keep the values that the model has before it is sharded."""
            if model is not None:
                self._watch.session.remember(model)

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            """Wait for the first call."""
            if model is not None:
                self._watch.begin(model)

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            """Wait no longer."""
            self._watch.end()

    return TrainerCallback


def _lightning_callback() -> type:
    base: Any = _library("LightningCallback", "lightning.pytorch", "pytorch_lightning").Callback

    class LightningCallback(_Callback, base):  # type: ignore[misc]
        """Captures a LightningModule before its first step: `callbacks=[LightningCallback(path)]`."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Keep the values that the module has before it is sharded."""
            self._watch.session.remember(pl_module)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """Wait for the first call."""
            self._watch.begin(pl_module)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            """Wait no longer."""
            self._watch.end()

    return LightningCallback
