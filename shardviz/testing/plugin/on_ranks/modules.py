"""Test modules in ranks: imported as pytest imported them, with its rewriting of assertions."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from shardviz.live.world.torchrun import with_environment
from shardviz.testing.plugin import compat

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    import pytest


@dataclass(frozen=True, slots=True)
class Source:
    """Where a test module is, and how pytest imported it.

    Attributes:
        name: Its name in `sys.modules`.
        path: Its file.
        mode: `--import-mode`.
        root: pytest's root folder.
        namespace_packages: Whether folders without `__init__.py` may be packages.
        rewritten: Names of modules whose assertions are rewritten; None for `--assert=plain`.
    """

    name: str
    path: Path
    mode: str
    root: Path
    namespace_packages: bool
    rewritten: tuple[str, ...] | None


def source_of(item: pytest.Function) -> Source:
    """Return the test module of an item, as pytest imported it."""
    config, name = item.config, item.module.__name__
    rewritten = (name, *compat.rewritten_names(config)) if config.option.assertmode == "rewrite" else None
    namespaces = bool(config.getini("consider_namespace_packages"))
    return Source(name, item.path, config.getoption("importmode"), config.rootpath, namespaces, rewritten)


def load(source: Source) -> ModuleType:
    """Import a test module, unless that was done before it was forked."""
    module_here = sys.modules.get(source.name)
    if module_here is not None and getattr(module_here, "__file__", None) == str(source.path):
        return module_here
    if source.rewritten is not None:
        compat.rewrite(config(source.root), source.rewritten)
    return compat.import_path(
        source.path, mode=source.mode, root=source.root, namespace_packages=source.namespace_packages
    )


def explain_assertions(source: Source, verbosity: int) -> None:
    """Make failed assertions say what they compared, as pytest does while a test runs."""
    if source.rewritten is None:
        return
    configured = config(source.root)
    configured.option.verbose = verbosity
    compat.explain_assertions(configured)


@cache
def config(root: Path) -> pytest.Config:
    """Return a pytest configuration without the user's plugins; it rewrites assertions."""
    args = ["-c", os.devnull, "--rootdir", str(root), "--noconftest", "-p", "no:cacheprovider", "-p", "no:shardviz"]
    with with_environment({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": None, "PYTEST_PLUGINS": None}):
        return compat.make_config(args)
