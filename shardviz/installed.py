"""Probes that other distributions bring, by their entry points in the group `shardviz.probes`.

    [project.entry-points."shardviz.probes"]
    moe = "acme.probes.moe"

They are found and read as text, like all probes: to list them runs nothing of theirs.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import ProbeError
from shardviz.recipes import read

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from shardviz.recipes import Recipe

GROUP = "shardviz.probes"


def installed() -> tuple[list[Recipe], dict[str, ProbeError]]:
    """Return the probes of all other distributions by name, `acme-probes/moe`, and why some cannot be had."""
    found: dict[str, Recipe] = {}
    broken: dict[str, ProbeError] = {}
    for entry in entry_points(group=GROUP):
        name = f"{entry.dist.name if entry.dist else 'unknown'}/{entry.name}"
        try:
            found.setdefault(name, _read(name, entry))
        except ProbeError as error:
            broken[name] = error
    return [found[name] for name in sorted(found)], broken


def _read(name: str, entry: EntryPoint) -> Recipe:
    match = entry.pattern.match(entry.value)
    if match is None:
        raise ProbeError(
            f"probe {name}: entry point {entry.value!r} names no module", f'write {entry.name} = "package.module"'
        )
    path = _file(match["module"])
    if path is None:
        raise ProbeError(
            f"probe {name}: there is no module {match['module']}", f"install {name.partition('/')[0]} again"
        )
    version = entry.dist.version if entry.dist else ""
    return read(name, path, match["attr"] or "build", match["module"], version)


def _file(module: str) -> Path | None:
    """Return a module's file. Only the outermost package is asked for: Python imports all that is around a module."""
    outermost, *parts = module.split(".")
    try:
        spec = find_spec(outermost)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not parts:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    places = [Path(folder, *parts) for folder in spec.submodule_search_locations or ()]
    files = (file for place in places for file in (Path(f"{place}.py"), place / "__init__.py"))
    return next((file for file in files if file.is_file()), None)
