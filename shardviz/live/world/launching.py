"""Launching a world: `launch` starts ranks on this machine, runs a task on each, and leaves nothing behind."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from shardviz.errors import ShardvizError
from shardviz.live.world import starting
from shardviz.live.world.failures import output
from shardviz.live.world.protocol import Job
from shardviz.live.world.watch import Watch
from shardviz.machine import free_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.live.world.starting import Member, Method

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
    """Run a task on every rank of a new world on this machine, each with a process group initialised.

    Ranks start from the same state: seed 0 for torch, numpy and random, one thread, this process's environment and
    working folder (plus RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on, as under torchrun), an empty `__main__`.
    What they print is caught. They are in a session of their own and die with the launcher, which never imports torch.

    Args:
        task: "package.module:function"; called as `function(world, *args)`, see `World`.
        args: Further arguments, the same for every rank; must pickle, and not be made of `__main__`'s classes.
        num_ranks: How many ranks.
        method: "fork" copies a server process that has imported torch (fast; started once per launcher),
            "spawn" starts a fresh interpreter per rank.
        backend: A process group backend; by default nccl where each rank has a GPU, else gloo.
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


def _unpickle_result(task: str, rank: int, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:
        message = f"the result of {task} on rank {rank} cannot be unpickled here: {error}"
        raise ShardvizError(message, hint="return plain data: numbers, strings, lists, numpy arrays") from None
