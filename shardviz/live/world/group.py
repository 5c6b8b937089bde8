"""A rank's process group: its backend, how ranks meet; and random states, set, kept and copied.

Imports torch, so only ranks import it.
"""

from __future__ import annotations

import os
import random
import socket
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardviz.errors import ShardvizError
from shardviz.live.compat.fsdp import give_cpu_streams_events
from shardviz.live.compat.worlds import leave_world, let_gloo_average
from shardviz.live.world.protocol import Job, World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


BUILDS = {
    "nccl": "nccl comes with torch's CUDA builds for Linux",
    "mpi": "mpi needs a torch that was built from source on a machine with MPI",
}
"""Where to find backends that most builds of torch lack."""

LONGER = 60.0
"""Seconds by which torch's own timeout exceeds the launcher's, whose message about a hang says more."""


def join_local(job: Job, rank: int) -> World:
    """Join a world whose ranks all run on this machine and meet in a file of its private folder."""
    world = make_world(rank, job.num_ranks, job.backend, num_local=job.num_ranks, local_rank=rank)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (loopback := _loopback()):
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # gloo would look up the hostname, which laptops get wrong
    settle()
    dist.init_process_group(
        world.backend,
        store=dist.FileStore(str(job.folder / "store"), job.num_ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=job.num_ranks,
        timeout=timedelta(seconds=job.timeout + LONGER),
    )
    return world


@contextmanager
def joined(world: World, timeout: float) -> Iterator[None]:
    """Join the job that the environment describes; leave it unless it was joined before."""
    is_joined_here = not dist.is_initialized()
    if is_joined_here:
        settle()
        dist.init_process_group(
            world.backend,
            init_method="env://",
            rank=world.rank,
            world_size=world.num_ranks,
            timeout=timedelta(seconds=timeout),
        )
    yield
    if is_joined_here:
        dist.barrier()  # rank 0 may host the store that the others still talk to
        leave_world()


def make_world(rank: int, num_ranks: int, backend: str | None, *, num_local: int, local_rank: int) -> World:
    """Check the backend, and take this rank's GPU if it needs one; let a CPU stand in for one.

    Args:
        backend: The backend asked for; None is gloo, with or without GPUs.
        local_rank: This rank's place among them, and the number of its GPU.

    Raises:
        ShardvizError: This build of torch lacks the backend, or the machine the GPUs for it.
    """
    backend = backend or "gloo"
    _check_backend(backend, num_local)
    device_type = "cuda" if "nccl" in backend else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        give_cpu_streams_events()
        let_gloo_average()
    return World(rank, num_ranks, backend, device_type)


def settle() -> None:
    """Give every rank the same start: one thread, and seed 0 for torch, numpy and random."""
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(1)
    seed(0)


def seed(number: int) -> None:
    """Seed torch, random and, if it is installed, numpy."""
    random.seed(number)
    torch.manual_seed(number)
    with suppress(ImportError):
        import numpy as np

        np.random.seed(number)


def leave() -> None:
    """Shut the process group down if there still is one."""
    if dist.is_initialized():
        leave_world()


def _check_backend(backend: str, num_local: int) -> None:
    backends = [
        name
        for name in dist.Backend.backend_list
        if name not in ("undefined", "fake") and dist.is_backend_available(name)
    ]
    for name in (part.rpartition(":")[2] for part in backend.split(",")):
        if name not in backends:
            message = f"torch {torch.__version__} has no process group backend {name!r}"
            source = f"{BUILDS[name]}; " if name in BUILDS else ""
            raise ShardvizError(message, hint=f"{source}this one has {', '.join(backends)}")
        if name == "nccl" and (num_gpus := torch.cuda.device_count()) < num_local:
            message = f"nccl needs one GPU per rank: this machine has {num_local} ranks and {num_gpus} GPUs"
            raise ShardvizError(message, hint="use the gloo backend, or a mesh of fewer ranks")


def _loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def kept_random_states() -> AbstractContextManager[None]:
    """Restore torch's random states afterwards: the CPU's, and this rank's GPU's if used.

    torch's `fork_rng` by itself takes every GPU of the machine, seven of them other ranks', and warns about it.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng([torch.cuda.current_device()] if is_used else [])


def random_states() -> list[torch.Tensor]:
    """Copy the states of the generators that modules draw from: the CPU's, and this rank's GPU's if used."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if is_used else [])]
