"""A test where pytest itself runs on every rank, under torchrun: the body runs here, on the ranks that are there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from shardviz.live import world
from shardviz.testing.launching import MESH
from shardviz.testing.options import ranks_seed, ranks_timeout

if TYPE_CHECKING:
    from shardviz.testing.marks import Spmd


def run(item: pytest.Function, spmd: Spmd) -> None:
    """Run a test on this rank of a job that is large enough for its mesh and no larger."""
    __tracebackhide__ = True
    joined = world.torchrun_world(spmd.backend)
    assert joined is not None
    if joined.num_ranks != spmd.mesh.size:
        pytest.skip(f"mesh {spmd.mesh} has {spmd.mesh.size} ranks, this job has {joined.num_ranks}")
    from shardviz.live.world import group
    from shardviz.testing import ranks

    with group.joined(joined, spmd.timeout or ranks_timeout(item.config)):
        ranks.seed(ranks_seed(item.config))
        values = _arguments(item)
        device_mesh = ranks.device_mesh(spmd.mesh, joined.device_type)
        plain = item.stash.get(MESH, None)
        ranks.call(partial(item.obj, **{n: device_mesh if v is plain else v for n, v in values.items()}))


def _arguments(item: pytest.Function) -> dict[str, Any]:
    """Return a test's arguments; the folder for its dump is rank 0's on every rank."""
    from torch import distributed

    values = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    if "shard_dump" in values:
        shared = [values["shard_dump"]]
        distributed.broadcast_object_list(shared)
        values["shard_dump"] = shared[0]
    return values
