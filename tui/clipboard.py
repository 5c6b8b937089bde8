"""Copying text: through the terminal, and through a command of tmux or macOS where that is not enough."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.app import App

PATIENCE = 2.0
"""Seconds after which a copy command is given up."""


def copy(app: App[None], text: str) -> None:
    """Copy a text.

    The terminal is asked with OSC 52, which also works through ssh. tmux drops it by default, and the terminal of macOS
    does not know it: there a copy command runs too. If none of these works, the text is not copied.
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
