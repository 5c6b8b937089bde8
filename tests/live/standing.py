"""Worlds that stay and run one probe after another, so that ranks start once for all probes of a module of tests.

A probe that raises on a rank ends its world, and runs again in a world of its own, whose error is the one that a user
would see. `tests/conftest.py` ends the worlds of a module after the last of its tests.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz.dump.write import prepare_folder
from shardviz.errors import ShardvizError
from shardviz.live import world
from tests.live.worlds import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Hashable

    from shardviz.live.job import ProbeJob
    from shardviz.live.world import World

TASK = "tests.live.standing:serve"
MOST_PROBES = 24
"""A world leaves after so many, as each of them has made process groups that stay."""
LONG = 3600.0

_worlds: dict[Hashable, Standing] = {}


def run(job: ProbeJob) -> None:
    """Run a probe on ranks that stand ready, or on new ones if it raises there."""
    standing = _world_for(job.mesh.size)
    if not standing.has_run(job):
        _worlds.pop(_key(job.mesh.size)).kill()
        prepare_folder(job.folder, force=True)
        job.launch()
    elif standing.num_left == 0:
        _worlds.pop(_key(job.mesh.size)).end()


def end_all() -> None:
    """End every world."""
    while _worlds:
        _worlds.popitem()[1].end()


def serve(on: World, address: str) -> None:
    """Run the probes that the tests' process sends to this rank, until none is left."""
    from shardviz.live.probe import run_probe
    from shardviz.live.world.group import settle

    line = _connected(address)
    line.send(os.getpid())
    while (job := line.recv()) is not None:
        settle()
        run_probe(on, job)
        line.send(on.rank)


def _connected(address: str) -> Connection[Any, Any]:
    own = socket.socket(socket.AF_UNIX)
    own.connect(address)
    return Connection(own.detach())


def _key(num_ranks: int) -> Hashable:
    """Return what ranks take over from their launcher when they start."""
    environ = frozenset((name, text) for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST")
    return num_ranks, os.getcwd(), environ


def _world_for(num_ranks: int) -> Standing:
    key = _key(num_ranks)
    if key not in _worlds:
        _worlds[key] = Standing(num_ranks)
    return _worlds[key]


class Standing:
    """One world."""

    def __init__(self, num_ranks: int) -> None:
        self.num_left = MOST_PROBES
        world.prepare("fork", also=("shardviz.live.probe",))
        with tempfile.TemporaryDirectory(prefix="standing-") as folder, socket.socket(socket.AF_UNIX) as listening:
            address = str(Path(folder) / "ranks")
            listening.settimeout(PATIENCE)
            listening.bind(address)
            listening.listen(num_ranks)
            self._thread = threading.Thread(target=self._launch, args=(num_ranks, address), daemon=True)
            self._thread.start()
            self._lines = [Connection(listening.accept()[0].detach()) for _ in range(num_ranks)]
        self._pids = [line.recv() for line in self._lines]

    def _launch(self, num_ranks: int, address: str) -> None:
        with suppress(ShardvizError):  # of a rank that raised, or was killed: the probe runs again elsewhere
            world.launch(TASK, (address,), num_ranks=num_ranks, timeout=LONG)

    def has_run(self, job: ProbeJob) -> bool:
        """Run a probe; return whether it ended well on every rank."""
        self.num_left -= 1
        for line in self._lines:
            line.send(job)
        running = list(self._lines)
        while running:
            news = wait(running, PATIENCE)
            for line in news:
                try:
                    line.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    return False
                running.remove(line)  # type: ignore[arg-type]
            if not news:
                return False
        return True

    def end(self) -> None:
        """Let the ranks go."""
        for line in self._lines:
            with suppress(OSError):
                line.send(None)
        self._thread.join(PATIENCE)
        self._close()

    def kill(self) -> None:
        """End ranks of which one may wait for another that raised."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._thread.join(PATIENCE)
        self._close()

    def _close(self) -> None:
        for line in self._lines:
            line.close()
