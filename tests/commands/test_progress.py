"""What is shown while a verb works stays on its one line."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios
import time
from typing import TYPE_CHECKING

from shardviz.commands.common import streams as shown

if TYPE_CHECKING:
    import pytest


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_is_as_wide_as_stderr_where_stdout_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 31, 0, 0))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(shown, "PATIENCE", 0.0)
    monkeypatch.setattr(shown, "INTERVAL", 0.001)
    with os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with shown.progress(lambda: "planning a mesh " * 9):
            written = b""
            while b" s" not in written:
                written += os.read(ours, 1000)
    os.close(ours)
    first = written.decode().split(shown.CLEAR)[1]
    assert first.startswith("planning a mesh ")
    assert len(first.partition(" s")[0]) + len(" s") < 31


def test_a_text_wider_than_the_screen_is_cut_before_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(shown, "PATIENCE", 0.0)
    monkeypatch.setattr(shown, "INTERVAL", 0.001)
    with shown.progress(lambda: "planning a mesh " * 9):
        until = time.monotonic() + 60
        while " s" not in screen.getvalue() and time.monotonic() < until:
            time.sleep(0.001)
    first = screen.getvalue().split(shown.CLEAR)[1]
    assert len(first) < 40
    assert first.startswith("planning a mesh ")
    assert first.endswith(", 0 s")
