"""Whether copies of a gradient are equal: by their digests first, and by their values, rounding apart, where not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.copies import copies_of
from shardviz.check.step.compared import laid_out, rounding_of
from shardviz.check.step.gradients import check_gradient
from shardviz.live.capture import local_tensors, unwrapped
from shardviz.live.meshes import plain_mesh
from shardviz.live.step import gradients
from shardviz.testing.gathering import gather
from shardviz.testing.message import ShardAssertionError
from shardviz.testing.subjects import device_mesh_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.check.finding import Finding
    from shardviz.dump.tensors import Model, Shard, Tensor
    from shardviz.live.capture import Capture


def check_reduced(model: nn.Module, mesh: DeviceMesh | None) -> tuple[Model, list[Finding]]:
    """Return what all ranks hold, and the gradients whose copies differ. Every rank of the job calls this.

    Raises:
        ShardAssertionError: No rank has any gradient.
    """
    __tracebackhide__ = True
    known = device_mesh_of(model, mesh)
    own = gradients(list(local_tensors(unwrapped(model), plain_mesh(known) if known is not None else None)))

    def add_digests(seen: Capture) -> None:
        for local in own:
            seen.add_values(local, "initial")

    digests = gather(add_digests, known)
    if not digests.tensors:
        raise ShardAssertionError("no parameter has a gradient on any rank\n  fix       call backward() first")
    suspects = {tensor.names[at] for tensor in digests.tensors for at in _differing(tensor)}
    if not suspects:
        return digests, []

    def add_dense(seen: Capture) -> None:
        for local in own:
            if local.name in suspects:
                seen.add_values(local, "step")

    values = gather(add_dense, known)
    return values, [finding for tensor in values.tensors for finding in _findings(values, tensor)]


def _differing(tensor: Tensor) -> list[int]:
    """Return the places of the fold's names whose copies differ in any bit."""
    groups = copies_of(tensor, None)
    return [
        at for at in range(len(tensor.names)) if any(len({shard.digest(at) for shard in group}) > 1 for group in groups)
    ]


def _findings(model: Model, tensor: Tensor) -> list[Finding]:
    rounding = rounding_of(model)
    found = []
    for name in tensor.names:
        one = laid_out(model, tensor, name, assembled(model, tensor, name), rounding)
        finding = check_gradient(one)
        if finding is not None:
            found.append(finding)
    return found


def assembled(model: Model, tensor: Tensor, name: str) -> NDArray[np.float64]:
    """Return the whole gradient, each element as the lowest rank that has it says."""
    shape = tensor.claimed.index_shape if tensor.claimed else tensor.shape
    whole = np.full(shape, np.nan)
    for shard in reversed(tensor.shards.values()):
        values = model.values(tensor, shard, name)
        if shard.layout is None:
            whole = values
        else:
            whole.ravel()[_ids(shard, shape)] = values
    return whole


def _ids(shard: Shard, shape: tuple[int, ...]) -> NDArray[np.int64]:
    assert shard.layout is not None
    return shard.layout.region(shard.layout.mesh.coord_of(shard.rank)).flat_ids(shape)
