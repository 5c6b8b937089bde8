"""Lines, statements and modules by room; long functions; private functions that are called once; literal tolerances."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.gauges.tree import Source

LONG = 60
"""Lines above which a function is long."""
TOLERANCES = "shardviz.relate.tolerance"
"""The module in which comparisons may have numbers of their own."""
EXACT = (0.0, 1.0, float("inf"))
"""Numbers that are no tolerance when something is compared with them."""


@dataclass(frozen=True)
class Size:
    """How large some files are together."""

    lines: int
    statements: int
    modules: int

    @classmethod
    def of(cls, files: Iterable[Source]) -> Size:
        """Count files."""
        sizes = [(file.text.count("\n"), num_statements(file.nodes)) for file in files]
        return cls(sum(lines for lines, _ in sizes), sum(number for _, number in sizes), len(sizes))

    @property
    def density(self) -> float:
        """Statements a line."""
        return self.statements / max(self.lines, 1)


def num_statements(nodes: Iterable[ast.AST]) -> int:
    """Count statements; docstrings are none."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def by_room(files: Iterable[Source]) -> dict[str, Size]:
    """Return the size of each room, in alphabetical order; modules in no folder of `shardviz` are one room.

    Modules of tests that have only data are a room of their own.
    """
    rooms: dict[str, list[Source]] = {}
    for file in files:
        is_alone = file.path.parent.parts == ("shardviz",)
        room = "shardviz" if is_alone else "tests, examples" if file.is_examples else file.room
        rooms.setdefault(room, []).append(file)
    return {room: Size.of(rooms[room]) for room in sorted(rooms)}


def long_functions(files: Iterable[Source]) -> list[tuple[str, int]]:
    """Return functions that are too long, with their lines, the longest first."""
    found = [
        (f"{file.path}:{function.lineno} {function.name}", lines)
        for file in files
        for function in file.functions
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > LONG
    ]
    return sorted(found, key=lambda one: (-one[1], one[0]))


def called_once(files: Sequence[Source]) -> list[str]:
    """Return private functions and methods that are named once besides their definition."""
    found = []
    for file in files:
        names = Counter(_names(file.nodes))
        private = (function for function in file.functions if function.name.startswith("_"))
        own = [function for function in private if not function.name.endswith("__")]
        found += [f"{file.path}:{one.lineno} {one.name}" for one in own if names[one.name] == 1]
    return found


def num_private(files: Iterable[Source]) -> int:
    """Count private functions and methods."""
    names = (function.name for file in files for function in file.functions)
    return sum(name.startswith("_") and not name.endswith("__") for name in names)


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def literal_tolerances(files: Iterable[Source]) -> list[str]:
    """Return comparisons with a literal that is not whole, outside the module of tolerances."""
    found = []
    for file in files:
        if file.module == TOLERANCES:
            continue
        for node in file.nodes:
            if isinstance(node, ast.Compare) and any(map(_has_tolerance, (node.left, *node.comparators))):
                found.append(f"{file.path}:{node.lineno} {ast.unparse(node)}")
    return found


def _has_tolerance(side: ast.AST) -> bool:
    """Whether one side of a comparison has a float that may be a tolerance, alone or as a part of a product or sum."""
    if isinstance(side, (ast.BinOp, ast.UnaryOp)):
        return any(map(_has_tolerance, ast.iter_child_nodes(side)))
    return isinstance(side, ast.Constant) and isinstance(side.value, float) and side.value not in EXACT
