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

from shardviz.live.run.hooks import wrapping
from shardviz.live.run.hooks.observing import quietly
from shardviz.live.run.hooks.table import HOOKS
from shardviz.live.run.options import Options
from shardviz.live.run.stamped.table import STAMPED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from shardviz.live.run.hooks.wrapping import Around

TRACED = "torch.optim.optimizer"
"""The module that is hooked under `--trace` only: an optimizer says which model is trained."""


@cache
def hooked() -> dict[str, tuple[Around, ...]]:
    """Return what is wrapped in this process, by module; what `--stamp` changes is outermost."""
    options = Options.of_environment()
    hooks: dict[str, tuple[Around, ...]] = dict(HOOKS)
    if options.trace == "off":
        del hooks[TRACED]
    for name, changed in STAMPED.items() if options.stamp else ():
        hooks[name] = (*hooks.get(name, ()), *changed)
    return hooks


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
    quietly(module.__name__, wrapping.wrap, module, hooked()[module.__name__])


def install() -> None:
    """Watch imports from now on; modules that are there already are wrapped at once."""
    sys.meta_path.insert(0, _Finder())
    for name in sorted(hooked().keys() & sys.modules.keys()):
        wrap(sys.modules[name])
