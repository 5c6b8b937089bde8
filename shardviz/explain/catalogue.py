"""The whole catalogue: importing it enters every module's causes."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from shardviz import explain
from shardviz.explain.cause import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.explain.cause import Cause

MACHINERY = frozenset({"catalogue", "cause", "finding", "kinds", "pages", "templates"})
"""The modules here that define no cause; every other one is a family of causes."""

for family in iter_modules(explain.__path__):
    if family.name not in MACHINERY:
        import_module(f"{explain.__name__}.{family.name}")

CATALOGUE: Mapping[str, type[Cause]] = BY_NAME
"""Every cause by its name."""
