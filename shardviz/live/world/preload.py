"""Imported in the fork server only: torch, once, for all the ranks that will be forked from it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""What ranks need. A version of torch that lacks one does without."""


def main() -> None:
    """Import `MODULES`, quietly, and stop at once if the launcher is gone."""
    _be_quiet()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch loads; a forked thread pool is a dead one
    gc.disable()  # a third of the time to import torch goes to collecting what is not garbage
    with ending_with(os.getppid()):
        for name in MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.enable()
    gc.freeze()  # ranks share these pages, a collection in a rank would copy them


@contextlib.contextmanager
def ending_with(launcher: int) -> Iterator[None]:
    """Exit once `launcher` is gone; `multiprocessing` looks only after the imports. No thread is left to fork."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            if os.getppid() != launcher:
                os._exit(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    over.set()
    watcher.join()


def _be_quiet() -> None:
    """Let go of the launcher's terminal and pipes: a fork server has nothing to say to a user."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.close(null)


def is_fork_server() -> bool:
    """Whether this process is the one that ranks are forked from."""
    return any("multiprocessing.forkserver import main" in arg for arg in sys.orig_argv)


if is_fork_server():
    main()
