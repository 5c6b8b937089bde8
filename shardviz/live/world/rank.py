"""A rank's process: leave the terminal, meet the others, run the task, report.

Torch is imported late, so that a rank that fails to import it can say so. Nothing of a rank reaches the launcher but
its messages and, through files, its output and its stacks.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardviz.errors import ShardvizError
from shardviz.live.world import output, preload, stacks
from shardviz.live.world.failures import describe
from shardviz.live.world.protocol import WHERE, Died, Done, Job, Message, Ready, Started, World, load_task
from shardviz.live.world.torchrun import variables

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path


def main(job: Job, rank: int, connection: Connection[bytes, bytes]) -> None:
    """Be one rank, from the first line of its process to the last."""
    isolate(job, rank)
    line = Line(connection, job.folder, rank)
    line.send(Started(threading.get_ident()))
    try:
        line.send(preload.failure() or _run(job, rank, line))
    except SystemExit as leaving:
        line.send(Died(exit_code(leaving), time.monotonic()))
    except BaseException as error:
        line.send(describe(error))
    output.flush()
    line.wait_for_end()
    _shut_down()
    leave()


def isolate(job: Job, rank: int) -> None:
    """Make this process a rank: its own session, streams, environment; stacks on SIGUSR1."""
    os.setsid()  # no Ctrl-C from the launcher's terminal, and a group to be killed as a whole
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    output.redirect(job.folder, rank)
    stacks.register(job.folder, rank)


class Line:
    """A rank's line to its launcher: reports out, requests in, and the launcher's end."""

    def __init__(self, connection: Connection[bytes, bytes], folder: Path, rank: int) -> None:
        self._connection = connection
        self._folder = folder
        self._rank = rank
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="shardviz-launcher", daemon=True).start()

    def send(self, message: Message) -> None:
        """Report to the launcher."""
        self._connection.send_bytes(pickle.dumps(message))

    def wait_for_end(self) -> None:
        """Stay until all ranks have finished: one that leaves early breaks the others' connections."""
        self._ended.wait()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                if self._connection.recv_bytes() == WHERE:
                    with suppress(Exception):
                        stacks.write_group(self._folder, self._rank)
                else:
                    self._ended.set()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.killpg(os.getpid(), signal.SIGKILL)


def call(job: Job, world: World) -> bytes:
    """Run the task; return its pickled result."""
    value = load_task(job.task)(world, *load_args(job))
    try:
        return pickle.dumps(value)
    except Exception as error:
        message = f"{job.task} returned a {type(value).__name__} that cannot be sent to the launcher: {error}"
        raise ShardvizError(message, hint="return plain data: numbers, strings, lists, numpy arrays") from None


def load_args(job: Job) -> tuple[Any, ...]:
    """Unpickle the task's arguments."""
    try:
        args: tuple[Any, ...] = pickle.loads(job.args)
    except Exception as error:
        message = f"the arguments of {job.task} cannot be unpickled in a rank: {error}"
        hint = "define their classes in a module: ranks do not import the script that launches them"
        raise ShardvizError(message, hint=hint) from None
    return args


def exit_code(leaving: SystemExit) -> int:
    """The exit code that the interpreter gives a `SystemExit`."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


def leave() -> None:
    """End this process and its children now; torch's own teardown takes longer than a task."""
    output.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpid(), signal.SIGTERM)
    os._exit(0)


def _run(job: Job, rank: int, line: Line) -> Done:
    from shardviz.live.world import group

    os.environ.update(variables(rank, job.num_ranks, job.num_ranks))
    world = group.join_local(job, rank)
    line.send(Ready())
    return Done(call(job, world))


def _shut_down() -> None:
    from shardviz.live.world import group

    with suppress(Exception):
        group.leave()
