"""Launching a world: `launch` starts ranks, runs a task on each, and leaves nothing behind.

It watches the world until all of its ranks have finished, one has failed, or the time is up.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardviz.errors import ShardvizError
from shardviz.live.world import failures, output, starting
from shardviz.live.world.protocol import Died, Done, Failed, Job, Message, Outcome, Ready, Started
from shardviz.live.world.starting import Member, Method, kill
from shardviz.machine import free_memory

GIB = 1 << 30
RANK_MEMORY = 40 << 20
"""Bytes that a forked rank has for itself once it has run a small sharded model: measured, 570 ranks took 22 GiB."""

OnOutput = Callable[[int, str], None]
"""Called with a rank and all of its output."""


def launch(
    task: str,
    args: tuple[Any, ...] = (),
    *,
    num_ranks: int,
    method: Method = "fork",
    backend: str | None = None,
    timeout: float = 60.0,
    coords: Sequence[str] = (),
    on_output: OnOutput | None = None,
) -> list[Any]:
    """Run a task on every rank of a new world on this machine, each with a process group.

    Ranks start from the same state: seed 0 for torch, numpy and random, one thread, this process's environment and
    working folder (plus RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on, as under torchrun), an empty `__main__`.
    What they print is caught. They are in a session of their own and die with the launcher, which never imports torch.

    Args:
        task: "package.module:function"; called as `function(world, *args)`, see `World`.
        args: Further arguments, the same for every rank; must pickle, and not be made of `__main__`'s classes.
        num_ranks: How many ranks.
        method: "fork" copies a server process that has imported torch (fast; started once per launcher),
            "spawn" starts a fresh interpreter per rank.
        backend: A process group backend; by default nccl if each rank has a GPU, else gloo.
        timeout: Seconds that the task may take, counted from when all ranks have met.
        coords: A label for each rank ("fsdp=0, tp=1"), used in messages.
        on_output: Called for each rank with its output, whether the world succeeds or fails.

    Returns:
        What the task returned on each rank, in rank order.

    Raises:
        ShardvizError: Raised by a rank as it is; or the job cannot be: no such backend, too many ranks, bad arguments.
        RankFailedError: A rank raised anything else, died, or did not finish in time.
    """
    _check(task, num_ranks, method)
    payload = _pickle_args(task, args)
    with TemporaryDirectory(prefix="shardviz-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job = Job(task, payload, num_ranks, backend, timeout, folder, dict(os.environ))
        members: list[Member] = []
        finished = False
        try:
            starting.start(members, job, method)
            results = Watch(members, job, coords).results()
            finished = True
        finally:
            starting.end(members, finished=finished)
            if on_output is not None:
                for rank in range(num_ranks):
                    on_output(rank, output.read(folder, rank))
    return [_unpickle_result(task, rank, result) for rank, result in enumerate(results)]


def _check(task: str, num_ranks: int, method: str) -> None:
    module, _, function = task.partition(":")
    if not module or not function.isidentifier():
        raise ShardvizError(f"{task!r} does not name a task", hint='a task is named "package.module:function"')
    if num_ranks < 1:
        raise ShardvizError(f"cannot launch {num_ranks} ranks: a world has at least 1")
    if method not in ("fork", "spawn"):
        raise ShardvizError(f"unknown launch method {method!r}", hint="use fork or spawn")
    free = free_memory()
    if free is not None and num_ranks * RANK_MEMORY > free:
        needed = f"{num_ranks:,} ranks need about {num_ranks * RANK_MEMORY / GIB:,.1f} GiB of memory"
        hint = f"at most {free // RANK_MEMORY:,} ranks fit here: use a smaller mesh, or torchrun on more machines"
        raise ShardvizError(f"{needed}, this machine has {free / GIB:,.1f} GiB free", hint=hint)


def _pickle_args(task: str, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(args)
    except Exception as error:
        hint = "pass plain data, and classes and functions that a module defines"
        raise ShardvizError(f"the arguments of {task} cannot be pickled for the ranks: {error}", hint=hint) from None


def _unpickle_result(task: str, rank: int, pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        message = f"the result of {task} on rank {rank} cannot be unpickled here: {error}"
        raise ShardvizError(message, hint="return plain data: numbers, strings, lists, numpy arrays") from None


GRACE = 0.5
"""Seconds after the first failure in which others may fail too, to be counted, or turn out to be first."""
ECHO_GRACE = 2.0
"""The same while all failures look like echoes of one that has not been seen yet."""
MET_GRACE = 5.0
"""The same while some ranks have met the others, and these are about to say so: on a busy machine that takes longer."""
LONG = 5.0
"""Seconds after which Ctrl-C is taken to mean that ranks hang, and their places are said."""
START_LIMIT = 240.0
"""Seconds without news, beyond the timeout, that ranks have for importing torch and meeting."""


class Watch:
    """The state of a world as its launcher sees it."""

    def __init__(self, members: Sequence[Member], job: Job, coords: Sequence[str]) -> None:
        self._members = members
        self._job = job
        self._coords = coords
        self._heard_at = time.monotonic()
        self._failed_at: float | None = None

    def results(self) -> list[bytes]:
        """Wait for each rank's pickled result.

        Raises:
            ShardvizError: A rank raised it.
            RankFailedError: A rank raised something else, died, or did not finish in time.
            KeyboardInterrupt: Ctrl-C; with where ranks were, if they had run for a while.
        """
        try:
            while self._running() and time.monotonic() < self._deadline():
                self._listen(max(0.0, self._deadline() - time.monotonic()))
        except KeyboardInterrupt as interrupt:
            if time.monotonic() - self._heard_at > LONG and all(member.ready for member in self._members):
                interrupt.args = (failures.places_text(self._members, self._coords, self._job.folder),)
            raise
        outcomes = {member.rank: member.outcome for member in self._members if member.outcome is not None}
        if self._failed_at is not None:
            waiting = failures.places_text(self._members, self._coords, self._job.folder)
            raise failures.explain(outcomes, self._coords, self._job.folder, waiting)
        if self._running():
            raise failures.explain_hang(self._members, self._job.timeout, self._coords, self._job.folder)
        return [outcome.value for outcome in outcomes.values() if isinstance(outcome, Done)]

    def _running(self) -> list[Member]:
        return [member for member in self._members if member.outcome is None]

    def _deadline(self) -> float:
        if self._failed_at is not None:
            bad = [member.outcome for member in self._members if isinstance(member.outcome, Failed | Died)]
            have_met = any(member.ready for member in self._members)
            if have_met and not all(member.ready for member in self._running()):
                return self._failed_at + MET_GRACE
            return self._failed_at + (ECHO_GRACE if all(map(failures.is_echo, bad)) else GRACE)
        if all(member.ready for member in self._members):
            return self._heard_at + self._job.timeout
        return self._heard_at + self._job.timeout + START_LIMIT

    def _listen(self, seconds: float) -> None:
        running = self._running()
        news = wait([*(member.line for member in running), *(member.process.sentinel for member in running)], seconds)
        for member in running:
            if member.line in news:
                self._receive(member)
        for member in running:
            while member.process.sentinel in news and member.outcome is None:
                if member.line.poll():  # its last words, or the end of the line
                    self._receive(member)
                else:
                    self._note_end(member)

    def _receive(self, member: Member) -> None:
        try:
            message: Message = pickle.loads(member.line.recv_bytes())
        except (EOFError, OSError):
            self._note_end(member)
            return
        if isinstance(message, Started):
            member.thread = message.thread
        elif isinstance(message, Ready):
            member.ready = True
        else:
            self._settle(member, message)
        if not isinstance(message, Done):
            self._heard_at = time.monotonic()

    def _note_end(self, member: Member) -> None:
        """Note a rank whose process has ended, or cannot be reached any more."""
        member.process.join(GRACE)
        if member.process.exitcode is None:
            kill(member.process)
            member.process.join()
        self._settle(member, Died(member.process.exitcode or 0, time.monotonic()))

    def _settle(self, member: Member, outcome: Outcome) -> None:
        member.outcome = outcome
        if self._failed_at is None and not isinstance(outcome, Done):
            self._failed_at = time.monotonic()
