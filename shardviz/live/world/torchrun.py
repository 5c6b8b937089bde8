"""Joining a job that torchrun or a similar launcher started, as one of its ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardviz.errors import ShardvizError
from shardviz.live.world.failures import RankFailedError, describe, name_rank
from shardviz.live.world.protocol import World, load_task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Where the ranks of a job meet, unless torchrun is given another address."""

STORE_TIMEOUT = timedelta(seconds=10)
"""How long to look for the store of a job's launcher, which is there unless the job is ending."""


def variables(rank: int, num_ranks: int, num_local: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank; a rendezvous that is set stays.

    Args:
        num_local: The number of ranks on a machine; the last one may have fewer.
    """
    machine = rank // num_local
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank % num_local,
        "LOCAL_WORLD_SIZE": min(num_local, num_ranks - machine * num_local),
        "GROUP_RANK": machine,
        "GROUP_WORLD_SIZE": -(-num_ranks // num_local),
    }
    meeting = {name: os.environ.get(name, value) for name, value in MEETING.items()}
    return {name: str(number) for name, number in numbers.items()} | meeting


@contextlib.contextmanager
def with_environment(settings: Mapping[str, str | None]) -> Iterator[None]:
    """Have some variables in the environment, and not those that are None; afterwards they are as they were.

    What the code inside has set itself stays.
    """
    before = {name: os.environ.get(name) for name in settings}
    _set_variables(settings)
    try:
        yield
    finally:
        unchanged = {name for name, value in settings.items() if os.environ.get(name) == value}
        _set_variables({name: value for name, value in before.items() if name in unchanged})


def _set_variables(settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def environment_of(rank: int, num_ranks: int, num_local: int) -> contextlib.AbstractContextManager[None]:
    """Have what torchrun sets in the environment of a rank; what the code inside has set itself stays, as on a rank."""
    return with_environment(variables(rank, num_ranks, num_local))


def torchrun_world(backend: str | None = None) -> World | None:
    """Return the world of RANK and WORLD_SIZE, importing torch; None if they are not set.

    LOCAL_RANK chooses the GPU; the backend is nccl if each of the machine's LOCAL_WORLD_SIZE ranks has one.

    Raises:
        ShardvizError: A variable is not a number, the ranks do not fit, or the backend is not available.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, num_ranks = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < num_ranks:
        raise ShardvizError(f"RANK={rank} is not below WORLD_SIZE={num_ranks}", hint="start the job with torchrun")
    from shardviz.live.world import group

    num_local, local_rank = _number("LOCAL_WORLD_SIZE", num_ranks), _number("LOCAL_RANK", rank)
    return group.make_world(rank, num_ranks, backend, num_local=num_local, local_rank=local_rank)


def run_joined(
    task: str,
    args: tuple[Any, ...] = (),
    *,
    backend: str | None = None,
    timeout: float = 600.0,
    coords: Sequence[str] = (),
) -> Any:
    """Run a task in this process as the rank that torchrun says it is.

    The process group is initialized from the environment and destroyed at the end, unless there already is one.
    After a failure it is left as it is: the launcher of the job ends the other ranks.

    Args:
        task: "package.module:function"; called as `function(world, *args)`.
        args: Further arguments.
        backend: A process group backend; by default nccl if each rank has a GPU, else gloo.
        timeout: Seconds that torch waits in a collective.
        coords: A label for each rank, used in messages.

    Returns:
        What the task returned on this rank.

    Raises:
        ShardvizError: Raised by the task as it is, or there is no job to join.
        RankFailedError: The task raised anything else.
    """
    world = torchrun_world(backend)
    if world is None:
        raise ShardvizError("RANK and WORLD_SIZE are not set: there is no job to join", hint="start it with torchrun")
    from shardviz.live.world import group

    try:
        with group.joined(world, timeout):
            return load_task(task)(world, *args)
    except ShardvizError:
        raise
    except Exception as error:
        raise _failure(error, world, coords) from error


def is_first_to_report(text: str) -> bool:
    """Whether no other torchrun rank has reported the same error; True outside torchrun.

    The launcher's own store counts, so that a rank which prints nothing cannot end the job before another prints.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        import torch.distributed as dist

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, timeout=STORE_TIMEOUT)  # type: ignore[attr-defined]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        return int(store.add(f"shardviz/{attempt}/{key}", 1)) == 1
    except Exception:  # the job is ending, or its launcher is another one than it says
        return True


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ShardvizError(f"{name}={text!r} is not a number", hint="start the job with torchrun") from None


def _failure(error: Exception, world: World, coords: Sequence[str]) -> RankFailedError:
    failed = describe(error)
    return RankFailedError(
        f"{name_rank(world.rank, coords)} {failed.headline}",
        rank=world.rank,
        coord=coords[world.rank] if world.rank < len(coords) else "",
        traceback_text=failed.traceback_text,
    )
