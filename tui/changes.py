"""Whether files on disk have changed: the size and the time of each one that a dump or a checkpoint has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Stamps = dict[str, tuple[int, int]]
"""For each file the time at which it was written last, in nanoseconds, and its size."""

MOST_FILES = 20_000
"""Files that are looked at: a folder with more of them is no longer looked through in a frame's time."""

DEEPEST = 3
"""Folders within folders that a checkpoint has at most."""


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Return the time and the size of every file in some folders, or of files themselves.

    What cannot be read now has none, and neither have files that are still being written under a temporary name.
    """
    found: Stamps = {}
    for path in paths:
        for entry, status in _files(os.fspath(path), DEEPEST):
            found[entry] = (status.st_mtime_ns, status.st_size)
            if len(found) >= MOST_FILES:
                return found
    return found


def _files(path: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files in a folder; links are looked at themselves, and not followed out of it."""
    try:
        if not os.path.isdir(path):
            yield path, os.stat(path)
            return
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(".tmp"):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    yield entry.path, entry.stat(follow_symlinks=False)
                elif depth > 1:
                    yield from _files(entry.path, depth - 1)
    except OSError:
        return
