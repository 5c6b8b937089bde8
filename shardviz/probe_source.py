"""Python files read as text: the names they define, and constants they assign or import.

Nothing runs and nothing is imported: a constant that comes from an import is read in the file of that module.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardviz.errors import ProbeError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
