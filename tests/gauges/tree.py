"""The source files, parsed once: which room each is in, and which other modules it imports."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOUSE = Path(__file__).resolve().parents[2]
PRODUCT = ("shardviz", "tui", "probes")
"""What is installed; `tests` is counted, but not judged."""


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        path: The file, from the root of the tree.
        text: What stands in it.
    """

    path: Path
    text: str

    @cached_property
    def module(self) -> str:
        """The name by which it is imported; `tui` and `probes` are installed in `shardviz`."""
        parts = self.path.with_suffix("").parts
        if parts[0] in PRODUCT[1:]:
            parts = (PRODUCT[0], *parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    @property
    def room(self) -> str:
        """The second folder of `shardviz`, or the name of a module that stands in no folder; else the first folder."""
        return room_of(self.module)

    @property
    def is_examples(self) -> bool:
        """Whether it is a module of tests that has only data: programs, cases and what is due of each."""
        code = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return self.room == "tests" and not any(isinstance(node, code) for node in self.nodes)

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def functions(self) -> Sequence[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods."""
        return [node for node in self.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        """All nodes of its tree."""
        found: list[ast.AST] = [self.tree]
        for node in found:  # as ast.walk does, in half the time
            for value in vars(node).values():
                if isinstance(value, ast.AST):
                    found.append(value)
                elif isinstance(value, list):
                    found += (one for one in value if isinstance(one, ast.AST))
        return found

    @cached_property
    def imports(self) -> Sequence[str]:
        """The modules, or names in modules, that it imports when it runs: those for types alone are left out."""
        tests = (node for node in self.nodes if isinstance(node, ast.If) and _is_for_types(node.test))
        for_types = {id(node) for test in tests for stmt in test.body for node in ast.walk(stmt)}
        found: list[str] = []
        for node in self.nodes:
            if id(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                found += [f"{base}.{alias.name}" for alias in node.names]
        return found

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def room_of(module: str) -> str:
    """Return the room of a module.

    Example:
        >>> room_of("shardviz.check.order.case"), room_of("shardviz.text"), room_of("tests.tui.driving")
        ('check', 'text', 'tests')
    """
    parts = module.split(".")
    return parts[min(1, len(parts) - 1)] if parts[0] == PRODUCT[0] else parts[0]


@cache
def sources() -> tuple[Source, ...]:
    """Return every Python file of the tree, in order."""
    paths = (path for top in (*PRODUCT, "tests") for path in sorted((HOUSE / top).rglob("*.py")))
    return tuple(Source(path.relative_to(HOUSE), path.read_text(encoding="utf-8")) for path in paths)


def imported(files: Sequence[Source]) -> Mapping[str, frozenset[str]]:
    """Return for each module those of the same files that it imports."""
    known = {file.module for file in files}
    return {file.module: frozenset(_known(name, known) for name in file.imports) - {"", file.module} for file in files}


def _known(name: str, known: set[str]) -> str:
    """Return the module of a name that is imported, which may be the module or something in it; empty if unknown."""
    if name in known:
        return name
    outer = name.rpartition(".")[0]
    return outer if outer in known else ""


def _is_for_types(test: ast.expr) -> bool:
    """Whether a condition is `TYPE_CHECKING` or `typing.TYPE_CHECKING`."""
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"
