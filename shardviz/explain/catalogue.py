"""The whole catalogue: importing it enters the causes of every family."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from shardviz import explain
from shardviz.explain.cause import BY_NAME, Cause

if TYPE_CHECKING:
    from collections.abc import Mapping


for family in iter_modules(explain.__path__, f"{explain.__name__}."):
    for module in iter_modules(import_module(family.name).__path__, f"{family.name}.") if family.ispkg else ():
        import_module(module.name)

CATALOGUE: Mapping[str, type[Cause]] = BY_NAME
"""Every cause by its name."""
