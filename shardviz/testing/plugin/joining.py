"""A test where pytest itself runs on every rank, under torchrun: the body runs here, on the ranks that are there."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.live import world
from shardviz.testing.plugin import compat
from shardviz.testing.plugin.launching import MESH
from shardviz.testing.plugin.options import ranks_seed, ranks_timeout
from shardviz.text import counted

if TYPE_CHECKING:
    from shardviz.live.world import World
    from shardviz.testing.plugin.marks import Spmd

_JOINED: pytest.StashKey[ExitStack] = pytest.StashKey()


def run(item: pytest.Function, spmd: Spmd) -> None:
    """Run a test on this rank of a job that is large enough for its mesh and no larger."""
    __tracebackhide__ = True
    joined = world.torchrun_world(spmd.backend)
    assert joined is not None
    if joined.num_ranks != spmd.mesh.size:
        pytest.skip(f"mesh {spmd.mesh} has {counted(spmd.mesh.size, 'rank')}, this job has {joined.num_ranks}")
    from shardviz.testing.plugin.on_ranks import ranks

    _join(item.config, joined)
    ranks.seed(ranks_seed(item.config))
    values = _arguments(item)
    device_mesh = ranks.device_mesh(spmd.mesh, joined.device_type)
    plain = item.stash.get(MESH, None)
    ranks.call(partial(item.obj, **{n: device_mesh if v is plain else v for n, v in values.items()}), item.name)


def _join(config: pytest.Config, joined: World) -> None:
    """Join the job for the rest of the session: ranks can meet only once through torchrun's store."""
    if _JOINED in config.stash:
        return
    from shardviz.live.world import group

    config.stash[_JOINED] = stack = ExitStack()
    stack.enter_context(group.joined(joined, ranks_timeout(config)))
    config.add_cleanup(stack.close)


def _arguments(item: pytest.Function) -> dict[str, Any]:
    """Return a test's arguments; the folder for its dump is rank 0's on every rank."""
    from torch import distributed

    values = {name: item.funcargs[name] for name in compat.argument_names(item)}
    if "shard_dump" in values:
        shared = [values["shard_dump"]]
        distributed.broadcast_object_list(shared)
        values["shard_dump"] = shared[0]
    return values
