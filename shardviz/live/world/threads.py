"""Ranks as the threads of one process: a fast approximation.

All ranks share the random state, module globals, the environment and the working folder, and collectives are copies
in memory, by a process group that torch keeps for its own tests. Good for a first look, not for a verdict.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardviz.live.world import preload
from shardviz.live.world.failures import output
from shardviz.live.world.failures.raised import describe
from shardviz.live.world.protocol import Died, Done, Ready, Started, World
from shardviz.live.world.rank import Line, call, exit_code, isolate, leave

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from typing import TextIO

    from shardviz.live.world.protocol import Job


def main(job: Job, ranks: list[int], lines: list[Connection[bytes, bytes]]) -> None:
    """Be all the ranks of a world."""
    isolate(job, ranks[0])
    streams = PerThread(sys.stdout)
    sys.stdout = sys.stderr = streams
    links = [Line(line, job.folder, rank) for rank, line in zip(ranks, lines, strict=True)]
    store = _prepare(links[0])
    if store is not None:
        for rank, link in zip(ranks, links, strict=True):
            threading.Thread(target=_run, args=(job, rank, link, store, streams), daemon=True).start()
    for link in links:
        link.wait_for_end()
    leave()


class PerThread(io.TextIOBase):
    """A stdout that writes to the file of the rank whose thread prints, else to `default`."""

    def __init__(self, default: TextIO) -> None:
        self._default = default
        self._files: dict[int, TextIO] = {}

    def add(self, file: TextIO) -> None:
        """Send what this thread prints to `file` from now on."""
        self._files[threading.get_ident()] = file

    def write(self, text: str) -> int:
        """Write to the file of the rank that calls."""
        return self._files.get(threading.get_ident(), self._default).write(text)

    def flush(self) -> None:
        """Flush them all."""
        for file in [self._default, *self._files.values()]:
            with suppress(ValueError):
                file.flush()

    def fileno(self) -> int:
        """The process's own stdout, for code that writes below Python."""
        return self._default.fileno()


def _prepare(first: Line) -> Any:
    first.send(Started(threading.get_ident()))
    if failed := preload.failure():
        first.send(failed)
        return None
    try:
        import torch.distributed as dist

        from shardviz.live import compat
        from shardviz.live.world import group

        compat.make_ranks_of_threads()
        group.settle()
        return dist.HashStore()  # type: ignore[attr-defined]
    except Exception as error:
        first.send(describe(error))
        return None


def _run(job: Job, rank: int, line: Line, store: Any, streams: PerThread) -> None:
    streams.add(output.path(job.folder, rank).open("a", buffering=1, encoding="utf-8"))
    line.send(Started(threading.get_ident()))
    try:
        world = _join(job, rank, store)
        line.send(Ready())
        line.send(Done(call(job, world)))
    except SystemExit as leaving:
        line.send(Died(exit_code(leaving), time.monotonic()))
    except BaseException as error:
        line.send(describe(error))
    streams.flush()


def _join(job: Job, rank: int, store: Any) -> World:
    import torch.distributed as dist

    dist.init_process_group("threaded", rank=rank, world_size=job.num_ranks, store=store)
    return World(rank, job.num_ranks, "threaded", "cpu")
