"""Wraps functions of torch and of libraries as soon as their modules are imported. Imports nothing of them itself.

A name that a script takes by `from torch... import fully_shard` is bound at its import, so what it binds has to be the
wrapped function: the module's loader wraps it when it has run the module.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from shardviz.live.run.options import Options

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

HOOKED = frozenset(
    {
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "torch.distributed._composable.fsdp.fully_shard",
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "torch.distributed.tensor.parallel.api",
        "torch.distributed.tensor._api",
        "torch.nn.parallel.distributed",
        "deepspeed.runtime.engine",
        "torch.nn.modules.module",
        "torch.distributed.pipelining.schedules",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.checkpoint.state_dict_loader",
        "torch.distributed.distributed_c10d",
        "transformers.modeling_utils",
        "torch.distributed.elastic.multiprocessing.errors",
        "torch.multiprocessing.spawn",
        "safetensors",
        "torch.serialization",
    }
)
"""The modules that define what shards, loads, calls and steps. `table` says what of each is wrapped."""

STAMPED = frozenset(
    {
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed.checkpoint.state_dict_saver",
    }
)
"""The modules that are hooked under `--stamp` only. `stamped/table` says what of all is changed."""


TRACED = frozenset({"torch.optim.optimizer"})
"""The module that is hooked under `--trace` only: an optimizer says which model is trained."""


@cache
def hooked() -> frozenset[str]:
    """Return the modules whose functions are wrapped in this process."""
    options = Options.of_environment()
    return HOOKED | (STAMPED if options.stamp else set()) | (TRACED if options.trace != "off" else set())


class _Finder(MetaPathFinder):
    """Finds nothing by itself: it lets the others find a module, and has it wrapped once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that the other finders have for a hooked module."""
        if name not in hooked():
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        others = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _wrap_after(spec.loader)
        return spec


def _wrap_after(loader: Any) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        if module.__name__ in hooked():  # the loader of an archive is that of all of its modules
            wrap(module)

    with suppress(AttributeError):  # a loader without a __dict__: the module stays as it is
        loader.exec_module = exec_module


def wrap(module: ModuleType) -> None:
    """Wrap what is hooked of a module that was just imported; what goes wrong is reported and stops nothing."""
    from shardviz.live.run.hooks.observing import quietly

    quietly(module.__name__, _wrap, module)


def _wrap(module: ModuleType) -> None:
    from shardviz.live.run.hooks import wrapping
    from shardviz.live.run.hooks.table import HOOKS

    hooks: list[wrapping.Around] = [*HOOKS.get(module.__name__, ())]
    if Options.of_environment().stamp:
        from shardviz.live.run.stamped.table import STAMPED as CHANGED

        hooks += CHANGED.get(module.__name__, ())
    wrapping.wrap(module, hooks)


def install() -> None:
    """Watch imports from now on; modules that are there already are wrapped at once."""
    sys.meta_path.insert(0, _Finder())
    for name in sorted(hooked() & set(sys.modules)):
        wrap(sys.modules[name])
