"""Copying: by the terminal itself, and by what stands between where that keeps programs from it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.app import App

PATIENCE = 2.0
"""Seconds that a command for copying may take."""


def copy(app: App[None], text: str) -> None:
    """Copy a text.

    A terminal is asked by OSC 52, which goes through ssh. tmux swallows that unless it is told otherwise, and macOS's
    own terminal does not know it: there a command is asked too. Where none of this works, nothing can be done.
    """
    app.copy_to_clipboard(text)
    for command in _commands():
        try:
            subprocess.run(
                command, input=text.encode(), timeout=PATIENCE, check=False, capture_output=True, close_fds=True
            )
        except (OSError, subprocess.TimeoutExpired):
            continue


def _commands() -> list[list[str]]:
    tmux = [["tmux", "load-buffer", "-w", "-"]] if os.environ.get("TMUX") else []
    return tmux + ([["pbcopy"]] if sys.platform == "darwin" else [])
