"""The line that computes the plain numbers which a line reads: offsets, sizes and slices, which no call shows."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType, FrameType

PLAIN = (int, float, slice)


@dataclass(frozen=True)
class Assignment:
    """A statement of a function.

    Attributes:
        line: The number of its first line, in the file.
        end: That of its last line.
        sets: The names that it sets.
        reads: The names that it reads.
        computes: Whether it computes anything, beside calling and copying.
    """

    line: int
    end: int
    sets: frozenset[str]
    reads: frozenset[str]
    computes: bool


def first_line_of_numbers(frame: FrameType) -> int:
    """Return the line at which the numbers begin to be computed that a running line reads; that line without any."""
    begin, waiting, statements = frame.f_lineno, [frame.f_lineno], statements_of(frame.f_code)
    visited: set[int] = set()
    while waiting:
        line = waiting.pop()
        names = {name for one in statements if one.line <= line <= one.end for name in one.reads}
        plain = {name for name in names if isinstance(frame.f_locals.get(name), PLAIN)}
        for name in plain:
            earlier = [one for one in statements if one.line < line and name in one.sets]
            if earlier and earlier[-1].computes and earlier[-1].line not in visited:
                visited.add(earlier[-1].line)
                waiting.append(earlier[-1].line)
                begin = min(begin, earlier[-1].line)
    return begin


@lru_cache(maxsize=512)
def statements_of(code: CodeType) -> tuple[Assignment, ...]:
    """Return the simple statements of a function, in order; none if its source cannot be read."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return ()
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
    found = [_assignment(node, first - 1) for node in ast.walk(tree) if isinstance(node, simple)]
    return tuple(sorted(found, key=lambda one: one.line))


def _assignment(node: ast.stmt, before: int) -> Assignment:
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    sets = frozenset(one.id for one in names if isinstance(one.ctx, ast.Store))
    reads = frozenset(one.id for one in names if isinstance(one.ctx, ast.Load))
    is_slice = any(isinstance(one, ast.Call) and getattr(one.func, "id", "") == "slice" for one in ast.walk(node))
    computes = is_slice or any(isinstance(one, ast.BinOp) for one in ast.walk(node))
    return Assignment(before + node.lineno, before + (node.end_lineno or node.lineno), sets, reads, computes)
