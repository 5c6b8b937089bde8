"""Run in the fork server only: imports torch once for all ranks forked from it.

An import that raises does not stop the server, which has nobody to complain to: ranks report it for it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from shardviz.live.world.failures import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.live.world.protocol import Failed

ALSO = "SHARDVIZ_PRELOAD"
"""The environment variable that names further modules, separated by commas."""

MODULES = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""Modules that ranks need. A version of torch that lacks one does without."""

_failures: list[Failed] = []


def main() -> None:
    """Import `MODULES` and those in `ALSO`, quietly; stop at once if the launcher is gone."""
    _be_quiet()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch loads; a forked thread pool is a dead one
    also = [name for name in os.environ.pop(ALSO, "").split(",") if name]
    gc.disable()  # a third of the time to import torch goes to collecting what is not garbage
    try:
        with ending_with(os.getppid()), _without_working_folder():
            _import_all(MODULES)
        _import_all(also)
    except BaseException as error:  # sys.exit() at the top of a user's file, too
        _failures.append(describe(error))
    gc.enable()
    gc.freeze()  # ranks share these pages, a collection in a rank would copy them


def failure() -> Failed | None:
    """Return the exception that stopped the imports of the fork server; None if none did."""
    return _failures[0] if _failures else None


def _import_all(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@contextlib.contextmanager
def _without_working_folder() -> Iterator[None]:
    """Import torch and what it needs without the user's folder, which may have a `cuda.py`.

    The folder is on the path if the launcher is `python -m shardviz`, or `PYTHONPATH` names it.
    """
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if os.path.realpath(entry or ".") != os.getcwd()]
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def ending_with(launcher: int) -> Iterator[None]:
    """Exit once `launcher` is gone, without leaving a thread to fork.

    `multiprocessing` looks only after the imports.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            if os.getppid() != launcher:
                os._exit(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:  # a thread that stayed would keep alive a process whose imports raised
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
