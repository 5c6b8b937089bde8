"""Cores and memory that this process may use, within its control groups' limits; and its garbage collector, paused."""

from __future__ import annotations

import gc
import math
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")

LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a limit and of what is used, and the name of what of that is given back, in version 2 and in version 1."""


def cores() -> int:
    """Return how many cores this process may use."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *_quotas()]))


def free_memory() -> int | None:
    """Return the bytes that new processes can take, if the system says so (Linux)."""
    available = _number_after(MEMORY, "MemAvailable:")
    found = [*_memory_left(), *([] if available is None else [available * 1024])]
    return min(found, default=None)


def _quotas() -> Iterator[int]:
    """Yield how many cores each group may keep busy, a part of one counted as one."""
    for group in _groups("cpu"):
        both = [_number(group / "cpu.max", at) for at in (0, 1)]
        if None in both:
            both = [_number(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        quota, period = both
        if quota and period and quota > 0 and period > 0:
            yield math.ceil(quota / period)


def _memory_left() -> Iterator[int]:
    """Yield the bytes that each group may still take; its file cache counts as free."""
    for group in _groups("memory"):
        for limit_name, used_name, kept in LIMITS:
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                yield max(0, limit - used + min(used, _number_after(group / "memory.stat", kept) or 0))


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, innermost first."""
    for line in _read_text(OWN_GROUPS).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controller if controllers else GROUPS
        parts = [part for part in path.split("/") if part]
        for depth in range(0 if ".." in parts else len(parts), -1, -1):
            yield root.joinpath(*parts[:depth])


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(file: Path, at: int = 0) -> int | None:
    """Return a number in a file; None if it has none, or says `max`."""
    words = _read_text(file).split()
    return int(words[at]) if len(words) > at and words[at].isdecimal() else None


def _number_after(file: Path, name: str) -> int | None:
    """Return the number that follows a name at the beginning of a line."""
    found = (line.split() for line in _read_text(file).splitlines())
    return next((int(words[1]) for words in found if words[:1] == [name] and words[1:2] and words[1].isdecimal()), None)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Turn the garbage collector off: reading a thousand ranks' files takes half the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
