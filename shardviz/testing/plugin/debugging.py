"""A debugger in a rank, on pytest's own terminal: `--pdb` and `breakpoint()`."""

from __future__ import annotations

import bdb
import os
import pdb
import sys
from typing import TYPE_CHECKING, Any

from shardviz.testing.plugin import compat

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


MARK = "debugged"
"""The file that says that a rank opened the debugger."""


class DebuggedTest(bdb.BdbQuit):
    """Ends a test that was debugged on its rank; pytest then opens no debugger itself."""


def terminal(config: pytest.Config) -> str:
    """Return the path of the terminal that pytest was started from; empty if there is none."""
    with compat.without_capture(config):
        return next((os.ttyname(stream) for stream in (0, 1, 2) if os.isatty(stream)), "")


def give_terminal(path: str, rank: int) -> None:
    """Let `breakpoint()` open the debugger on a terminal, if there is one."""
    if path:
        sys.breakpointhook = lambda *args, **kwargs: _debugger(path, rank).set_trace(sys._getframe(1))


def post_mortem(error: BaseException, path: str, rank: int, folder: Path) -> None:
    """Open the debugger where an exception was raised, on the first rank that asks."""
    if not path or error.__traceback__ is None:
        return
    try:
        (folder / MARK).touch(exist_ok=False)
    except FileExistsError:
        return
    debugger = _debugger(path, rank)
    debugger.message(f"\n>>> rank {rank}: {type(error).__name__}: {error}\n>>> post mortem; c or q ends it")
    debugger.reset()
    debugger.interaction(None, error.__traceback__)


def _debugger(path: str, rank: int) -> Any:
    """Return a debugger that keeps the terminal open as long as it lives."""
    opened = os.open(path, os.O_RDWR | os.O_NOCTTY)
    typed, shown = os.fdopen(opened), os.fdopen(os.dup(opened), "w")
    debugger = pdb.Pdb(stdin=typed, stdout=shown)
    debugger.prompt = f"(rank {rank}) "
    debugger.use_rawinput = False
    return debugger
