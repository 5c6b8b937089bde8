"""Process groups: worlds that do not exist, and which ranks an operator speaks to."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardviz.live.compat.ddp import _ddp_unasked
from shardviz.live.compat.fakes import is_fake
from shardviz.live.compat.fsdp import give_cpu_streams_events
from shardviz.live.compat.modules import replaced
from shardviz.live.compat.tensors import real_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

PAUSE, MAX_PAUSE = 0.002, 0.1
"""Seconds between two looks at a store: at first, and at most."""

FREEING = 0.1
"""Seconds that torch 2.6.0 has to free the tensors of the last collectives."""


def default_store() -> Any:
    """Return the store where ranks met. `_get_default_store` in torch 2.6.0 to 2.15.0."""
    return torch.distributed.distributed_c10d._get_default_store()


def have_come(store: Any, keys: list[str], patience: float) -> bool:
    """Wait until a store has some keys; return False after `patience` seconds, silently.

    `Store.wait` would log a warning.
    """
    deadline, pause = time.monotonic() + patience, PAUSE
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, MAX_PAUSE)
    return True


@contextmanager
def world_of(group: Any) -> Iterator[None]:
    """Make a process group the whole world for its members.

    Names of groups are counted, and the members make groups that the others do not: the caller corrects
    their count with `count_groups`. `_update_default_pg` and `_world.default_pg`, tried on torch 2.6.0 to 2.15.0.
    """
    c10d = torch.distributed.distributed_c10d
    before = c10d._world.default_pg
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(before)


ALONE = "shardviz: this rank alone"


@contextmanager
def one_process() -> Iterator[None]:
    """Let this rank be the whole world, as in a job of one process: the unsharded model asks for no other rank."""
    distributed = torch.distributed
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        yield
        return
    with world_of(_alone()), patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
        yield


def mesh_of_one_rank(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with the same axes, along which this rank is alone."""
    names = mesh.mesh_dim_names or ()
    ranks = torch.full((1,) * len(names), torch.distributed.get_rank())
    return DeviceMesh.from_group([_alone()] * len(names), mesh.device_type, ranks, mesh_dim_names=names)


def _alone() -> Any:
    """Return the group of this rank alone, made when it is first needed.

    `_world.pg_group_ranks` in torch 2.6.0 to 2.15.0.
    """
    distributed = torch.distributed
    groups = distributed.distributed_c10d._world.pg_group_ranks
    made: Any = next((group for group in groups if getattr(group, "group_desc", "") == ALONE), None)
    return made or distributed.new_group([distributed.get_rank()], use_local_synchronization=True, group_desc=ALONE)


def count_groups(at_least: int = 0) -> int:
    """Return how many process groups were named, after setting it to a number if it is smaller.

    `_world.group_count`, tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    world = torch.distributed.distributed_c10d._world
    world.group_count = max(world.group_count, at_least)
    return int(world.group_count)


def groups_here() -> list[tuple[str, tuple[int, ...]]]:
    """Return the process groups that this rank is in, each with what its maker calls it.

    `_world.pg_group_ranks` and `group_desc` in torch 2.6.0 to 2.15.0; the groups of a mesh are called `mesh_` and the
    name of the axis.
    """
    ranks: dict[Any, dict[int, int]] = torch.distributed.distributed_c10d._world.pg_group_ranks
    rank = torch.distributed.get_rank()
    return [(str(getattr(group, "group_desc", "")), tuple(of)) for group, of in ranks.items() if rank in of]


def ranks_of_operator(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks of the group that one of torch's collective operators runs over.

    `c10d` operators get the group as a script object, functional ones its name; both are private. Tried on torch
    2.6.0, 2.13.0 and 2.15.0.
    """
    from torch import distributed

    groups: Any = distributed.distributed_c10d
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group: Any = distributed.ProcessGroup.unbox(arg)
            return tuple(distributed.get_process_group_ranks(group))
        if isinstance(arg, str) and "functional" in str(func) and arg in groups._world.pg_names.values():
            return tuple(distributed.get_process_group_ranks(groups._resolve_process_group(arg)))
    return tuple(range(distributed.get_world_size()))


def leave_world() -> None:
    """Destroy all process groups.

    Torch 2.6.0 holds the GIL while it joins gloo's threads, and hangs if one of them waits for the GIL to free a tensor
    of the last collective: one world in 100. These threads get time to end first. Torch 2.9.1, 2.13.0 and 2.15.0 don't
    hang; they are known by `AllreduceOptions.asyncOp`.
    """
    if not hasattr(torch.distributed.AllreduceOptions(), "asyncOp"):
        time.sleep(FREEING)
    torch.distributed.destroy_process_group()


AVERAGED = ("_reduce_scatter_base", "reduce_scatter")
"""The methods of `ProcessGroup` that sum on gloo before torch 2.9 where they are asked to average."""

REFUSED = ("allreduce", "allreduce_coalesced", "reduce")
"""Those that refuse to average in torch 2.6.0."""


@cache
def let_gloo_average() -> None:
    """Let gloo average on a CPU as it does in newer torch, for ranks that shardviz starts.

    Before torch 2.9 it takes `ReduceOp.AVG` for a sum where it scatters the result, and 2.6.0 refuses it elsewhere. The
    methods of `ProcessGroup` above, which `torch.distributed` calls, sum and divide there. Tried on torch 2.6.0 and
    2.8.0; 2.9.1, 2.12.0, 2.13.0 and 2.15.0 average.
    """
    version: Any = torch.__version__
    refused = () if hasattr(torch.distributed.AllreduceOptions(), "asyncOp") else REFUSED
    for name in (*AVERAGED, *refused) if version < (2, 9) else ():
        setattr(torch.distributed.ProcessGroup, name, _averaging(getattr(torch.distributed.ProcessGroup, name)))


def _averaging(method: Any) -> Any:
    c10d: Any = torch._C._distributed_c10d
    autograd: Any = torch.autograd

    def run(group: Any, written: Any, *args: Any) -> Any:
        tensors, how = [written] if isinstance(written, torch.Tensor) else written, args[-1]
        if how.reduceOp != torch.distributed.ReduceOp.AVG or tensors[0].device.type != "cpu":
            return method(group, written, *args)
        how.reduceOp = torch.distributed.ReduceOp.SUM
        method(group, written, *args).wait()
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
            for tensor in tensors:
                with autograd._unsafe_preserve_version_counter(tensor):
                    tensor.div_(group.size(), rounding_mode=None if tensor.is_floating_point() else "trunc")
        done: Any = torch.futures.Future()
        done.set_result(tensors)
        return c10d._create_work_from_future(done)  # another wait() would write the sum again

    return run


def collective_called() -> tuple[str, tuple[Any, ...]] | None:
    """Return the function of `torch.distributed` that runs a collective now, and its arguments; None without one.

    Torch 2.6.0 hands these functions to no `TorchFunctionMode`, as 2.13.0 and 2.15.0 do.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.distributed_c10d":
        frame = frame.f_back
    if frame is None:
        return None
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_code.co_name, tuple(frame.f_locals[name] for name in names)


COLLECTIVES = {
    "_AllGather": "all_gather",
    "_AllGatherBase": "all_gather_into_tensor",
    "_AllReduce": "all_reduce",
    "_AlltoAll": "all_to_all",
    "_AlltoAllSingle": "all_to_all_single",
    "_Broadcast": "broadcast",
    "_Gather": "gather",
    "_Reduce": "reduce",
    "_Reduce_Scatter": "reduce_scatter",
    "_Scatter": "scatter",
}
"""The `autograd.Function`s of `torch.distributed.nn.functional`, tried on torch 2.6.0, 2.13.0 and 2.15.0, with what
their forward is."""


@contextmanager
def fake_world(rank: int, num_ranks: int) -> Iterator[None]:
    """Be one rank of a fake world, whose collectives send nothing and leave outputs unchanged.

    `FakeStore` of `torch.testing._internal`, and the backend "fake", tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    give_cpu_streams_events()
    distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        with _ddp_unasked(), _own_part_only():
            yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def _own_part_only() -> Iterator[None]:
    """Make FSDP2 build only this rank's and the first part of a parameter, not every rank's.

    `_chunk_with_empty`, in torch 2.6.0 to 2.15.0: two minutes of a plan on 100,000 ranks, a sixth of one on 1,024.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param as params

    with replaced(params, "_chunk_with_empty", _Chunks):
        yield


class _Chunks:
    """The chunks of `torch.chunk`, made on access and padded with empty ones to the full number."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._num_chunks = num_chunks
        self._dim = dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: int) -> torch.Tensor:
        index = range(self._num_chunks)[index]
        num_left = self._tensor.size(self._dim) - index * self._size
        if num_left <= 0 < self._size:
            return self[0].new_empty(0)
        return self._tensor.narrow(self._dim, index * self._size, min(self._size, num_left))


@contextmanager
def split_alike() -> Iterator[None]:
    """Make DTensor send every rank the first part of a tensor without values.

    The parts are padded to one shape.

    torch makes that of every rank and sends them: a minute for 80 layers over 1,024 ranks, under `fake_mode`. Nothing
    is sent here. `Shard._split_tensor`, and `mesh_scatter` in its module, in torch 2.6.0 to 2.15.0.
    """
    before = Shard._split_tensor
    module = sys.modules[Shard.__module__]
    send = module.mesh_scatter

    def split(self: Any, tensor: torch.Tensor, num_chunks: int, **how: bool) -> tuple[list[torch.Tensor], list[int]]:
        has_values = not (tensor.is_meta or is_fake(tensor))
        if has_values or not tensor.numel() or how != {"with_padding": True, "contiguous": True}:
            return before(self, tensor, num_chunks, **how)
        sizes, pads = _padded_sizes(before, tensor.size(self.dim), num_chunks)
        if len(sizes) > 1:
            return before(self, tensor, num_chunks, **how)
        first = tensor.narrow(self.dim, 0, min(sizes)).contiguous()
        return [first] * num_chunks, [*pads]

    def scatter(output: torch.Tensor, *args: Any, **named: Any) -> Any:
        return None if is_fake(output) else send(output, *args, **named)

    with replaced(Shard, "_split_tensor", split), replaced(module, "mesh_scatter", scatter):
        yield


@lru_cache(maxsize=1024)
def _padded_sizes(split: Any, size: int, num_chunks: int) -> tuple[frozenset[int], tuple[int, ...]]:
    """Return a dim's padded part sizes, and each part's padding, as torch splits it."""
    with real_tensors():
        dim = torch.empty(size, device="meta")
        parts, pads = split(Shard(0), dim, num_chunks, with_padding=True, contiguous=True)
    return frozenset(map(len, parts)), tuple(pads)
