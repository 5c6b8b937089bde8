"""Tasks that test_world.py runs on ranks: the well-behaved, and every kind of bad end."""

from __future__ import annotations

import ctypes
import os
import random
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardviz.errors import MeshError
from shardviz.live.world.torchrun import variables

if TYPE_CHECKING:
    from shardviz.live.world import World


def add_up(world: World, start: int = 0) -> dict[str, Any]:
    total = torch.tensor([world.rank + start])
    dist.all_reduce(total)
    return {"rank": world.rank, "world": world, "total": int(total)}


def look_around(world: World) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "setting": os.environ.get("SHARDVIZ_TEST_SETTING"),
        "of torchrun": {name: os.environ.get(name) for name in variables(0, 1, 1)},
        "cwd": os.getcwd(),
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "draws": (random.random(), float(torch.rand(()))),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


def talk(world: World) -> None:
    print(f"hello from {world.rank}")
    print("and to stderr", file=sys.stderr)
    os.write(1, b"from C\n")
    warnings.warn("a warning", stacklevel=1)
    dist.new_group([0])
    dist.barrier()


def finish_at_different_times(world: World) -> int:
    dist.barrier()
    time.sleep(0.3 * world.rank)
    return world.rank


def mesh_of_two_axes(world: World) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, world.num_ranks // 2), mesh_dim_names=("fsdp", "tp"))
    x = torch.full((2,), float(world.rank))
    dist.all_reduce(x, group=mesh.get_group("tp"))
    return x.tolist()


def fail_on(world: World, bad: int) -> None:
    if world.rank == bad:
        raise ValueError(f"a bad number\nof rank {bad}")
    dist.barrier()


def fail_at_length(world: World) -> None:
    try:
        raise KeyError("x" * 100_000)
    except KeyError as error:
        raise ValueError("\n".join(f"line {number}" for number in range(5000))) from error


def fail_everywhere(world: World) -> None:
    raise KeyError(f"missing on {world.rank}")


def fail_in_a_module(world: World) -> None:
    torch.nn.Sequential(torch.nn.Linear(2, 3))(torch.ones(4))


def misuse(world: World) -> None:
    raise MeshError("mesh 2 x 3 has 6 ranks, not 4", hint="use --mesh 2,2")


def close_connections_after(world: World, bad: int) -> None:
    """The echo comes first: rank `bad` breaks its connections, and only later says why."""
    if world.rank == bad:
        dist.destroy_process_group()
        time.sleep(0.4)
        raise ValueError("the cause")
    dist.barrier()


def die(world: World, bad: int, how: str) -> None:
    print("about to go")
    if world.rank == bad:
        end_process(how)
    dist.barrier()


def end_process(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), 9)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "_exit":
        os._exit(7)
    sys.exit(int(how))


def skip_the_collective(world: World, skipper: int) -> None:
    if world.rank != skipper:
        dist.all_gather_into_tensor(torch.empty(world.num_ranks), torch.ones(1))


def skip_the_axis(world: World, skipper: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    split = distribute_tensor(torch.ones(4, 4), mesh["fsdp"], [Shard(0)])
    if world.rank < 2:
        split.full_tensor()
    elif world.rank != skipper:
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), group=mesh.get_group("tp"))


def sleep_on(world: World, sleeper: int) -> None:
    if world.rank == sleeper:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


def sleep_with_a_child(world: World, note: str) -> None:
    child = subprocess.Popen(["sleep", "100"])
    with open(f"{note}.{world.rank}", "w") as file:
        file.write(f"{os.getpid()} {child.pid} {os.getppid()}")
    os.rename(f"{note}.{world.rank}", f"{note}.{world.rank}.done")
    time.sleep(100)


def leave_a_child(world: World) -> int:
    return subprocess.Popen(["sleep", "100"]).pid


def fail_beside_a_sleeper(world: World) -> None:
    if world.rank == 0:
        raise ValueError("early")
    time.sleep(100)


def return_a_lambda(world: World) -> Any:
    return lambda: None


def run_main(world: World, file: str) -> None:
    """Run a script's `main` as `torch.multiprocessing.spawn` does."""
    runpy.run_path(file)["main"](world.rank, str(Path(file).parent))


def shout(world: World) -> None:
    print("x" * (2 << 20))
    print("the end")


def echo(world: World, value: object) -> object:
    return value
