"""Move what this process has in memory to huge pages: a fork copies a table of hundreds of entries, not of 80,000.

A worker's fork server and the worker itself fork hundreds of ranks, and each fork takes 10 ms less. Imported last by
the server. Linux has it since 6.1; where it is refused, all stays as it is.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

MADV_COLLAPSE = 25
HUGE = 1 << 21


def collapse() -> None:
    """Collapse each writable mapping that is no file's."""
    maps, madvise = Path("/proc/self/maps"), getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not maps.exists():
        return
    for line in maps.read_text().splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights.startswith("rw") and inode == "0" and name in ([], ["[heap]"]):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            first, last = -(-start // HUGE) * HUGE, stop // HUGE * HUGE
            if first < last:
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_COLLAPSE)


collapse()
