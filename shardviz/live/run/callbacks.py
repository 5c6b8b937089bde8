"""`shardviz.watch` as a callback of transformers' Trainer and of Lightning: one line each.

Each class is made when it is first asked for: it derives from the library's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardviz.errors import ShardvizError
from shardviz.live.run.watching import Watch

if TYPE_CHECKING:
    from pathlib import Path


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


def _trainer_callback() -> type:
    base: Any = _library("TrainerCallback", "transformers").TrainerCallback

    class TrainerCallback(base):  # type: ignore[misc]
        """Captures the Trainer's model before its first step: `Trainer(..., callbacks=[TrainerCallback(path)])`."""

        def __init__(self, path: str | Path, reference: str | Path | None = None, *, force: bool = False) -> None:
            self._watch = Watch(path, reference, force=force)

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

    class LightningCallback(base):  # type: ignore[misc]
        """Captures a LightningModule before its first step: `Trainer(..., callbacks=[LightningCallback(path)])`."""

        def __init__(self, path: str | Path, reference: str | Path | None = None, *, force: bool = False) -> None:
            self._watch = Watch(path, reference, force=force)

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
