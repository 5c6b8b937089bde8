"""The lines of the user's code that make a call: the frames between a module's call and torch's function."""

from __future__ import annotations

import linecache
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardviz.dump.records.lines import FrameRecord
from shardviz.live.lines.numbers import first_line_of_numbers

if TYPE_CHECKING:
    from types import CodeType, FrameType

TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(__file__).parents[2]) + os.sep
HOOKS = f"{OURS}live{os.sep}run{os.sep}hooks{os.sep}"
"""Functions that a job's calls go through."""
HERE = str(Path(__file__).parent) + os.sep
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
    since = _since(frames[at][0]) if frames else None
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
    if file.startswith(OURS) and not file.startswith((f"{OURS}probes{os.sep}", HERE, HOOKS)):
        return "ours"
    if file.startswith(MODULES) and not file.startswith(PLUMBING):
        return "torch"
    is_wrapper = file.endswith(f"{os.sep}typing_extensions.py")
    is_library = (
        is_wrapper or file.startswith((TORCH, "<frozen")) or (file.startswith(LIBRARY) and "site-packages" not in file)
    )
    return "" if is_library or file.startswith((HERE, HOOKS)) else "user"


def _since(frame: FrameType) -> FrameRecord | None:
    line = first_line_of_numbers(frame)
    return None if line == frame.f_lineno else _record(frame, line)


def _record(frame: FrameType, line: int = 0) -> FrameRecord:
    file, line = frame.f_code.co_filename, line or frame.f_lineno
    source = linecache.getline(file, line, frame.f_globals).strip()
    return FrameRecord(_relative(file), line, frame.f_code.co_name, source[:MOST_SOURCE])


@lru_cache(maxsize=4096)
def _relative(file: str) -> str:
    """Return a file relative to the folder that it is imported from, the longest of them."""
    roots = [root for root in sys.path if root and file.startswith(root.rstrip(os.sep) + os.sep)]
    return os.path.relpath(file, max(roots, key=len)) if roots else Path(file).name
