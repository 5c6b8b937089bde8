"""Worlds that stay and run one task after another, so that ranks start once for many tests.

A task is a probe or a test on ranks. One that raises on a rank ends its world, and runs again in a world of its own,
whose error is the one that a user would see. `tests/conftest.py` ends the worlds of a module after the last of its
tests, and those of a folder in `tests/live`.
"""

from __future__ import annotations

import gc
import os
import shutil
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
from shardviz.live.world.protocol import load_task
from shardviz.testing.plugin import launching
from tests.live.worlds import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Hashable

    import pytest

    from shardviz.live.job import ProbeJob
    from shardviz.live.world import World
    from shardviz.testing.plugin.marks import SpmdMark

TASK = "tests.live.standing:serve"
MOST_TASKS = 24
"""A world leaves after so many, as each of them has made process groups that stay."""
PROBE, TEST = "shardviz.live.probe:run_probe", "shardviz.testing.plugin.ranks:run_test"
LONG = 3600.0

_worlds: dict[Hashable, Standing] = {}


def run(job: ProbeJob) -> None:
    """Run a probe on ranks that stand ready, or on new ones if it raises there."""
    if call(PROBE, job, job.mesh.size) is None:
        prepare_folder(job.folder, force=True)
        job.launch()


def has_run(item: pytest.Function, spmd: SpmdMark) -> bool:
    """Run a test on ranks that stand ready; return whether it passed: if not, it is the plugin's to run."""
    with tempfile.TemporaryDirectory(prefix="standing-", ignore_cleanup_errors=True) as name:
        warned = call(TEST, launching.pack(item, spmd, Path(name)), spmd.mesh.size)
    if warned is None:
        shutil.rmtree(item.funcargs.get("shard_dump", name), ignore_errors=True)
        return False
    launching.pass_on(one for of_rank in warned for one in of_rank)
    return True


def call(task: str, argument: Any, num_ranks: int) -> list[Any] | None:
    """Run a task on ranks that stand ready; return what it returned on each, None if it raised on one."""
    standing = _world_for(num_ranks)
    returned = standing.call(task, argument)
    if returned is None:
        _worlds.pop(_key(num_ranks)).kill()
    elif standing.num_left == 0:
        _worlds.pop(_key(num_ranks)).end()
    return returned


def end_all() -> None:
    """End every world."""
    while _worlds:
        _worlds.popitem()[1].end()


def serve(on: World, address: str) -> None:
    """Run the tasks that the tests' process sends to this rank, until none is left."""
    from shardviz.live.world.group import settle

    line = _connected(address)
    line.send(os.getpid())
    while (sent := line.recv()) is not None:
        task, argument = sent
        gc.collect()  # a job's ranks look at what lives in them
        settle()
        line.send(load_task(task)(on, argument))


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
        self.num_left = MOST_TASKS
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

    def call(self, task: str, argument: Any) -> list[Any] | None:
        """Run a task; return what it returned on each rank, None unless it ended well on all."""
        self.num_left -= 1
        for line in self._lines:
            line.send((task, argument))
        returned: dict[Any, Any] = {}
        while len(returned) < len(self._lines):
            news = wait([line for line in self._lines if line not in returned], PATIENCE)
            for line in news:
                try:
                    returned[line] = line.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    return None
            if not news:
                return None
        return [returned[line] for line in self._lines]

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
