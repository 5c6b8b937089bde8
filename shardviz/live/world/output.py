"""Ranks' output: caught in one file per rank, for the launcher, without torch's chatter."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 1 << 20
"""Bytes of a rank's output that are kept, the last ones."""
_CHATTER = re.compile(
    r"^(\[Gloo\] Rank \d+ is connected to .*"  # stdout, at every new group, torch 2.6 on
    r"|Extension modules: .*"  # faulthandler, after a crash
    r"|.*\[W\d+ .*(ProcessGroup\w*|socket|TCPStore|CUDAAllocatorConfig)\.\w+:\d+\].*)(\n|$)",
    re.MULTILINE,
)


def path(folder: Path, rank: int) -> Path:
    """Return the file with a rank's output."""
    return folder / f"output_{rank:05d}.txt"


def redirect(folder: Path, rank: int) -> None:
    """Send stdout and stderr, also of C++ code and child processes, to the rank's file."""
    caught = os.open(path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(caught, stream)
    os.close(caught)
    sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)


def _text_stream(number: int) -> TextIO:
    return open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def flush() -> None:
    """Flush the buffers of Python's own streams."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def read(folder: Path, rank: int) -> str:
    """Return the output of a rank, stdout and stderr in order, at most the last `LIMIT` bytes."""
    file = path(folder, rank)
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - LIMIT))
        text = stream.read().decode("utf-8", errors="replace")
    cut = f"[{size - LIMIT:,} bytes before this were dropped]\n" if size > LIMIT else ""
    return cut + _CHATTER.sub("", text)
