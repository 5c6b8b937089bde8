"""Probe files, found by name or path and read as text: nothing runs, torch isn't imported.

A probe is a Python file with `build()` and `parallelize(model, mesh)`, and usually a docstring and `AXES`, the names of
its mesh axes, outermost first. `shardviz.live.probe` is what runs one. A constant that comes from an
import is read in the file of that module.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardviz.errors import ProbeError
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


Item = TypeVar("Item")

MAX_HOPS = 8
"""A constant is followed through at most this many names and imports, which may go in a circle."""


@dataclass(frozen=True)
class Source:
    """One Python file.

    Attributes:
        path: The file.
        tree: What it says.
        folder: The folder that its absolute imports are looked up in first; None for a module of an installed package.
    """

    path: Path
    tree: ast.Module
    folder: Path | None


def top_level_names(tree: ast.Module) -> set[str]:
    """Return every name that a module binds at its top level; `*` for a star import."""
    names: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the top-level names of modules: of `import a`, and of `from a import b`."""
    names: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name for alias in node.names if module_file(f"{node.module}.{alias.name}")}
    return names


def constant_tuple(source: Source, name: str, kind: type[Item]) -> tuple[Item, ...]:
    """Return a tuple that a file assigns literally or imports; empty if it lacks the name.

    Raises:
        ProbeError: The file has the name, and it is something else or cannot be found without running the file.
    """
    assigned_in, value = _bound(source, name, MAX_HOPS)
    if assigned_in is None and value is None and name not in top_level_names(source.tree):
        return ()
    try:
        items = ast.literal_eval(value) if value is not None else None
    except ValueError:
        items = None
    if not isinstance(items, tuple | list) or not all(type(item) is kind for item in items):
        example = '("misordered",)' if name == "KINDS" else '("fsdp", "tp")' if kind is str else "(2, 4)"
        where = f" (read in {assigned_in.path})" if assigned_in is not None and assigned_in.path != source.path else ""
        hint = (
            f"write {name} = {example} in the probe or in a module that it imports {name} from: neither is run; or "
            f"rename {name} if it isn't meant for shardviz"
        )
        raise ProbeError(f"probe {source.path}: {name} is not a literal tuple of {kind.__name__}{where}", hint)
    return tuple(items)


def _bound(source: Source, name: str, hops: int) -> tuple[Source | None, ast.expr | None]:
    """Return the expression last bound to a name, and the file that has it."""
    for node in reversed(source.tree.body) if hops else ():
        if (value := _assigned(node, name)) is not None:
            return _bound(source, value.id, hops - 1) if isinstance(value, ast.Name) else (source, value)
        for original in _imported(node, name):
            assert isinstance(node, ast.ImportFrom)
            module = _imported_source(source, node)
            found = _bound(module, original, hops - 1) if module is not None else (None, None)
            if found[1] is not None:
                return found
    return None, None


def _assigned(node: ast.stmt, name: str) -> ast.expr | None:
    """Return what a statement assigns to `name`, if it does."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return None
    found = [value for target in targets for own, value in _pairs(target, node.value) if own == name]
    return found[-1] if found else None


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each assigned name and its value: `AXES, MESH = ("dp",), (2,)` has two.

    If the value can't be split, as in `AXES, MESH = both()`, each name gets all of it.
    """
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        parts = value.elts if isinstance(value, ast.Tuple) else []
        values = parts if len(parts) == len(target.elts) else [value] * len(target.elts)
        for one, own in zip(target.elts, values, strict=True):
            yield from _pairs(one, own)


def _imported(node: ast.stmt, name: str) -> Iterator[str]:
    """Yield what a statement's `from module import` calls a name in that module."""
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if alias.name == "*" or (alias.asname or alias.name) == name:
                yield name if alias.name == "*" else alias.name


def _imported_source(source: Source, node: ast.ImportFrom) -> Source | None:
    """Return the file that a `from module import` names; None if there is none that can be read."""
    if node.level:
        folder = source.path.parents[min(node.level, len(source.path.parents)) - 1]
        path = _file_in(folder, node.module.split(".") if node.module else [])
    else:
        parts = (node.module or "").split(".")
        path = (_file_in(source.folder, parts) if source.folder else None) or module_file(".".join(parts))
    if path is None:
        return None
    try:
        return Source(path, ast.parse(path.read_bytes(), filename=path.name), source.folder)
    except (OSError, SyntaxError, ValueError):
        return None


def module_file(module: str) -> Path | None:
    """Return a module's file, importing no package: only the outermost one is looked up."""
    outermost, *parts = module.split(".")
    try:
        spec = find_spec(outermost)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not parts:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    places = (_file_in(Path(folder), parts) for folder in spec.submodule_search_locations or ())
    return next((file for file in places if file is not None), None)


def _file_in(folder: Path, parts: list[str]) -> Path | None:
    """Return the file of a module in a folder; without parts, that of the folder as a package."""
    place = folder.joinpath(*parts)
    files = (Path(f"{place}.py"), place / "__init__.py") if parts else (place / "__init__.py",)
    return next((file for file in files if file.is_file()), None)


def _statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield statements and expressions of a block, including `if`, `try`, `with`, not functions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.ExceptHandler):
                yield from _statements(child.body)
            elif isinstance(child, ast.stmt):
                yield from _statements([child])
            else:
                yield from ast.walk(child)
