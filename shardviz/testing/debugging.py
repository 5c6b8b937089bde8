"""A debugger inside a rank, on the terminal that pytest was started from: `--pdb` and `breakpoint()`."""

from __future__ import annotations

import os
import pdb
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def terminal() -> str:
    """Return the path of this process's terminal; empty where it has none."""
    for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        if stream is not None and stream.isatty():
            return os.ttyname(stream.fileno())
    return ""


def give_terminal(path: str, rank: int) -> None:
    """Let `breakpoint()` open the debugger on a terminal, where there is one."""
    if path:
        sys.breakpointhook = lambda *args, **kwargs: _debugger(path, rank).set_trace(sys._getframe(1))


def post_mortem(error: BaseException, path: str, rank: int, folder: Path) -> None:
    """Open the debugger where an exception was raised, on the first rank that asks; do nothing without a terminal."""
    if not path or error.__traceback__ is None:
        return
    try:
        (folder / "debugged").touch(exist_ok=False)
    except FileExistsError:
        return
    debugger = _debugger(path, rank)
    debugger.message(f"\n>>> rank {rank}: {type(error).__name__}: {error}\n>>> post mortem; c or q ends it")
    debugger.reset()
    debugger.interaction(None, error.__traceback__)


def _debugger(path: str, rank: int) -> Any:
    """Return a debugger that keeps the terminal open as long as it lives."""
    opened = os.open(path, os.O_RDWR | os.O_NOCTTY)
    asked, told = os.fdopen(opened), os.fdopen(os.dup(opened), "w")
    debugger = pdb.Pdb(stdin=asked, stdout=told)
    debugger.prompt = f"(rank {rank}) "
    debugger.use_rawinput = False
    return debugger
