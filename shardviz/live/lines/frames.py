"""The lines of the user's code that make a call: the frames between a module's call and torch's function.

Beside them, the line that computes the plain numbers which such a line reads: offsets and slices, which no call shows.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardviz.dump.records.trace import FrameRecord

if TYPE_CHECKING:
    from types import CodeType, FrameType


TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(__file__).parents[2]) + os.sep
HERE = str(Path(__file__).parent) + os.sep
PASSED = (HERE, f"{OURS}live{os.sep}run{os.sep}hooks{os.sep}", f"{OURS}live{os.sep}compat{os.sep}")
"""Functions that the user's calls go through."""
LIBRARY = str(Path(os.__file__).parent) + os.sep
MODULES = str(Path(torch.nn.__file__).parent / "modules") + os.sep
PLUMBING = (f"{MODULES}module.py", f"{MODULES}container.py")
MOST_FRAMES = 16
MOST_SOURCE = 200
"""Characters of a source line that are kept."""


def frames_of(module: nn.Module | None) -> tuple[tuple[FrameRecord, ...], int, FrameRecord | None]:
    """Return the user's frames of the running call, from a module's call inwards, and which is a module's own.

    Last comes the line at which the numbers begin to be computed that this one's line reads, if that is another line.

    If torch's own modules make the call, without any line of the user's inside of the module, theirs counts. There are
    no frames if a hook of shardviz's makes it.

    Args:
        module: The module that is being recorded; None for a step, whose innermost frame outside of an
            `autograd.Function` is its own.
    """
    users: list[tuple[FrameType, bool]] = []
    torchs: list[tuple[FrameType, bool]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _module_of(frame)
        kind = _kind(frame.f_code)
        if kind == "ours" and not users:
            return (), 0, None
        if kind == "ours" and module is None:
            break
        if kind in ("user", "torch"):
            is_own = owner is not None if module is not None else frame.f_code.co_varnames[:1] != ("ctx",)
            (users if kind == "user" else torchs).append((frame, is_own))
        if owner is module and owner is not None and frame.f_code.co_name == "_call_impl":
            break
        frame = frame.f_back
    frames = (users or torchs[:1])[:MOST_FRAMES]
    at = next((at for at, (_, is_own) in enumerate(frames) if is_own), len(frames) - 1)
    begin = first_line_of_numbers(frames[at][0]) if frames else 0
    since = _record(frames[at][0], begin) if frames and begin != frames[at][0].f_lineno else None
    return tuple(_record(frame) for frame, _ in reversed(frames)), max(len(frames) - 1 - at, 0), since


def user_line() -> FrameRecord | None:
    """Return the innermost line of the user's code that is running; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _kind(frame.f_code) != "user":
        frame = frame.f_back
    return None if frame is None else _record(frame)


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose method a frame runs."""
    names = frame.f_code.co_varnames
    owner = frame.f_locals.get("self") if names[:1] == ("self",) else None
    return owner if isinstance(owner, nn.Module) else None


@lru_cache(maxsize=4096)
def _kind(code: CodeType) -> str:
    """Return whether code is the user's, ours, that of one of torch's modules, or none of these."""
    file = code.co_filename
    if file.startswith(OURS) and not file.startswith((f"{OURS}probes{os.sep}", *PASSED)):
        return "ours"
    if file.startswith(MODULES) and not file.startswith(PLUMBING):
        return "torch"
    is_wrapper = file.endswith(f"{os.sep}typing_extensions.py")
    is_library = (
        is_wrapper or file.startswith((TORCH, "<frozen")) or (file.startswith(LIBRARY) and "site-packages" not in file)
    )
    return "" if is_library or file.startswith(PASSED) else "user"


def _record(frame: FrameType, line: int = 0) -> FrameRecord:
    file, line = frame.f_code.co_filename, line or frame.f_lineno
    source = linecache.getline(file, line, frame.f_globals).strip()
    return FrameRecord(_relative(file), line, frame.f_code.co_name, source[:MOST_SOURCE])


@lru_cache(maxsize=4096)
def _relative(file: str) -> str:
    """Return a file relative to the folder that it is imported from, the longest of them."""
    roots = [root for root in sys.path if root and file.startswith(root.rstrip(os.sep) + os.sep)]
    return os.path.relpath(file, max(roots, key=len)) if roots else Path(file).name


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
