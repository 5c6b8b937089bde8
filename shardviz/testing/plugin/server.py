"""The fork server of a pytest session: imports its test modules once for all ranks."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import time
from contextlib import suppress
from pathlib import Path

from shardviz.live.world.preload import ending_with, is_fork_server
from shardviz.testing.plugin import parcel
from shardviz.testing.plugin.launching import VARIABLE

NEEDED = (
    "shardviz.testing.plugin.ranks",
    "shardviz.testing.assertions.calls",
    "shardviz.testing.assertions.copies",
    "shardviz.testing.assertions.rules",
    "shardviz.testing.assertions.equality",
    "shardviz.live.api",
)
"""Modules that every rank would otherwise import by itself, in every test."""


def main(file: Path) -> None:
    """Wait for the list of modules and import them; failures show up in the ranks."""
    with ending_with(os.getppid()):
        for name in NEEDED:
            importlib.import_module(name)
        while not file.exists():
            if not file.parent.exists():
                return
            time.sleep(0.005)
    path, sources = pickle.loads(file.read_bytes())
    sys.path[:] = path
    if any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd")):
        return  # a module that touches a GPU while it is imported would spoil it for every rank
    for source in sources:
        with suppress(BaseException):
            parcel.load(source)
    gc.freeze()


if is_fork_server() and VARIABLE in os.environ:
    main(Path(os.environ.pop(VARIABLE)))
