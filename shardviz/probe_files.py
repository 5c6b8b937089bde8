"""Probe files, found by name or path and read as text: nothing runs, torch isn't imported.

A probe is a Python file with `build()` and `parallelize(model, mesh)`, and usually a docstring and `AXES`, the names of
its mesh axes, outermost first. `shardviz.live.probe` is what runs one, `shardviz.probe_source` reads its text.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.errors import ProbeError
from shardviz.probe_source import Source, constant_tuple, imported_modules, module_file, top_level_names
from shardviz.text import did_you_mean, nearest
from shardviz.versions import package_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import EntryPoint

GROUP = "shardviz.probes"
"""The entry points by which other distributions bring probes:

    [project.entry-points."shardviz.probes"]
    moe = "acme.probes.moe"

They are found and read as text, like all probes: listing them runs none of their code.
"""

HOOKS = (
    *("build", "parallelize", "batch", "loss", "step", "optimizer", "expect", "log", "sequence", "stages"),
    *("initialize", "check_mesh", "whole_output", "collective_calls"),
    *("AXES", "MESH", "BATCH_AXES", "STAGE_AXES", "SEQUENCE", "KINDS", "TORCH"),
)
"""What a probe may define."""


@dataclass(frozen=True)
class Probe:
    """A probe, as much of it as can be read without running it.

    Attributes:
        name: `tp_fsdp`, `bugs/left_to_right_2d`, or the path that the user gave.
        path: Its file.
        summary: The docstring's first line.
        axes: The names of its mesh axes; empty if it takes any mesh.
        mesh: The sizes that it runs at by default; empty if it does not say.
        kinds: The findings that it must give; empty for all but recreated bugs.
        build: The name of the function that builds the model.
        torch: The oldest torch that has what it shows, `TORCH = (2, 9)`; empty if any will do.
        module: The name by which it is imported; empty if it is a file alone.
        version: The version of the distribution that brings it; empty for shardviz's own and for files.
        misspelt: Names that it defines and nothing uses, each with the hook that is meant: `("bacth", "batch")`.
    """

    name: str
    path: Path
    summary: str
    axes: tuple[str, ...]
    mesh: tuple[int, ...]
    kinds: tuple[str, ...] = ()
    build: str = "build"
    torch: tuple[int, ...] = ()
    module: str = ""
    version: str = ""
    misspelt: tuple[tuple[str, str], ...] = ()


def shipped() -> list[Probe]:
    """Return shardviz's own probes by name, the bugs last."""
    return list(_shipped())


@cache
def _shipped() -> tuple[Probe, ...]:
    return tuple(read(name, path) for name, path in shipped_files().items())


def shipped_files() -> dict[str, Path]:
    """Return shardviz's own probe files by name, bugs last, without reading them."""
    folder = _shipped_folder()
    files = [path for path in folder.rglob("*.py") if not path.name.startswith("_")]
    names = sorted((len(path.parts), path.relative_to(folder).with_suffix("").as_posix(), path) for path in files)
    return {name: path for _, name, path in names}


def find(text: str) -> Probe:
    """Find a probe by its name, or by `path/to/file.py[:function]`.

    A probe of another distribution is `distribution/name`, or `name` alone if only one has it.

    Raises:
        ProbeError: There is no such probe, several have the name, or the file is not a probe.
    """
    path, _, function = text.partition(":")
    if path.endswith(".py"):
        return read(text, Path(path).resolve(), function or "build")
    files = shipped_files()
    return read(text, files[text]) if text in files else _find_installed(text, files)


def _find_installed(text: str, shipped: Iterable[str]) -> Probe:
    others, broken = installed()
    names = {probe.name: probe for probe in others}
    matching = [name for name in (*names, *broken) if text in (name, name.partition("/")[2])]
    if len(matching) > 1:
        raise ProbeError(f"{len(matching)} distributions have a probe {text!r}", f"name one: {', '.join(matching)}")
    if not matching:
        hint = (
            did_you_mean(text, [*shipped, *names])
            or "`shardviz probes` lists them; the name of your own file ends in .py"
        )
        raise ProbeError(f"unknown probe {text!r}", hint)
    if matching[0] in broken:
        raise broken[matching[0]]
    return names[matching[0]]


def installed() -> tuple[list[Probe], dict[str, ProbeError]]:
    """Return the probes of other distributions, `acme-probes/moe`, and errors of broken ones."""
    probes: dict[str, Probe] = {}
    broken: dict[str, ProbeError] = {}
    for entry in entry_points(group=GROUP):
        name = f"{entry.dist.name if entry.dist else 'unknown'}/{entry.name}"
        try:
            probes.setdefault(name, _read_entry(name, entry))
        except ProbeError as error:
            broken[name] = error
    return [probes[name] for name in sorted(probes)], broken


def _read_entry(name: str, entry: EntryPoint) -> Probe:
    match = entry.pattern.match(entry.value)
    if match is None:
        raise ProbeError(
            f"probe {name}: entry point {entry.value!r} does not name a module",
            f'write {entry.name} = "package.module"',
        )
    path = module_file(match["module"])
    if path is None:
        raise ProbeError(
            f"probe {name}: module {match['module']} is not installed", f"install {name.partition('/')[0]} again"
        )
    version = entry.dist.version if entry.dist else ""
    return read(name, path, match["attr"] or "build", match["module"], version)


def check_torch(probe: Probe) -> None:
    """Make sure that the installed torch, which is not imported, has what a probe shows.

    Raises:
        ProbeError: It is too old.
    """
    version = package_version("torch")
    if version and tuple(map(int, re.findall("[0-9]+", version)[:2])) < probe.torch:
        needed = ".".join(map(str, probe.torch))
        raise ProbeError(
            f"probe {probe.name} needs torch {needed} or newer, found {version}", f"pip install 'torch>={needed}'"
        )


def is_shipped(probe: Probe) -> bool:
    """Whether a probe is one of shardviz's own, which can be imported by its name."""
    return probe.path.is_relative_to(_shipped_folder())


def _shipped_folder() -> Path:
    spec = find_spec("shardviz.probes")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def read(name: str, path: Path, build: str = "build", module: str = "", version: str = "") -> Probe:
    """Read a probe's file, without running it.

    Args:
        name: What the probe is called.
        path: Its file.
        build: The function in it that builds the model.
        module: The name by which it is imported; empty for a file alone.
        version: The version of the distribution that brings it.

    Raises:
        ProbeError: The file cannot be read, or is not a probe.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=path.name)
    except OSError as error:
        raise ProbeError(f"cannot read probe {path}: {error.strerror}", _near(path)) from error
    except (SyntaxError, ValueError) as error:
        raise ProbeError(f"probe {path} is not Python: {error}", f"python {path} shows where") from error
    defined = top_level_names(tree)
    for needed in (build, "parallelize"):
        if needed not in defined and "*" not in defined:
            raise ProbeError(
                f"probe {path} has no {needed}()",
                "a probe defines build(), which returns the model, and parallelize(model, mesh), which shards it",
            )
    docstring = ast.get_docstring(tree) or ""
    source = Source(path, tree, None if module else path.parent)
    axes, mesh = constant_tuple(source, "AXES", str), constant_tuple(source, "MESH", int)
    kinds, torch = constant_tuple(source, "KINDS", str), constant_tuple(source, "TORCH", int)
    misspelt = tuple(_misspelt(tree, defined - {build}))
    return Probe(name, path, docstring.partition("\n")[0], axes, mesh, kinds, build, torch, module, version, misspelt)


def _near(path: Path) -> str:
    """Return the hint for an unreadable file: a file with a similar name, if there is one."""
    if path.exists():
        return "give a Python file that you may read"
    if not path.parent.is_dir():
        return f"folder {path.parent} does not exist"
    close = nearest(path.name, [entry.name for entry in path.parent.glob("*.py")])
    return f"did you mean {path.with_name(close)}?" if close else f"{path.parent} has no file with a similar name"


def _misspelt(tree: ast.Module, defined: set[str]) -> Iterator[tuple[str, str]]:
    """Yield unused names that resemble a hook's name, each with that hook."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    free = [hook for hook in HOOKS if hook not in defined]
    for name in sorted(defined - used - set(HOOKS) - imported_modules(tree)):
        same = next((hook for hook in free if hook.lower() == name.lower()), None)
        if meant := same or nearest(name, free, cutoff=0.75):  # stricter: a helper of the user's own is not a typo
            yield name, meant
