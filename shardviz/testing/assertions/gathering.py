"""Gathers the tensors of all ranks on every rank: each rank captures, and all exchange their records.

Nothing is written to disk; the result is the `Dump` that reading a dump would give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from safetensors.numpy import load, save
from torch import distributed

from shardviz.dump.dump import Dump, dump_of
from shardviz.dump.read import DumpFiles
from shardviz.dump.records.files import RankRecord
from shardviz.errors import DumpError
from shardviz.layout.mesh import Mesh
from shardviz.live.api import add_model
from shardviz.live.capture.agreement import of_all_ranks, refuse_without_group
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.pipeline_parts import agree
from shardviz.live.capture.stamp import Stamped, under_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Gathered(DumpFiles):
    """A dump in memory, never written to disk.

    Attributes:
        arrays: Each rank's dense values, by rank and by `moment/role/name`.
    """

    arrays: dict[int, dict[str, NDArray[np.generic]]] = field(default_factory=dict)

    def dense(self, rank: int, key: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Return one array of a rank.

        Raises:
            DumpError: The rank sent no such array, or its shape is different.
        """
        array = self.arrays.get(rank, {}).get(key)
        if array is None or array.shape != shape:
            raise DumpError(f"rank {rank} sent no values of {key!r} in shape {list(shape)}")
        return array


def gather_ids(model: nn.Module, mesh: DeviceMesh | None, stamps: Stamped, stage_axes: Sequence[str]) -> Dump:
    """Return the ids that all ranks hold of a stamped model. Every rank of the job calls this.

    Args:
        model: The model, or this rank's stage of it.
        mesh: The mesh of the job; by default all ranks in a row.
        stamps: The result of stamping the model before it was sharded.
        stage_axes: The mesh axes along which ranks have different layers.

    Raises:
        MeshError: The mesh has no such axis.
        ShardvizError: No process group is initialized, or ranks of one stage stamped different tensors.
    """
    refuse_without_group("mark the test with @spmd(mesh=...), or pass the folder of a dump")
    inner = unwrapped(model)
    names = [local.name for local in local_tensors(inner)]
    stamps = stamps if stage_axes else under_names(stamps, names)
    part = agree(_job_mesh(mesh), stage_axes, stamps.stamps, names)
    return gather(lambda seen: add_model(seen, inner, mesh, stamps, part), mesh, Stamped(part.stamps))


def gather(
    add: Callable[[Capture], object], mesh: DeviceMesh | None, stamps: Stamped | None = None, reference: str = ""
) -> Dump:
    """Let every rank capture, and return the tensors of all ranks. Every rank of the job calls this.

    Args:
        add: Captures this rank's tensors.
        mesh: The mesh of the job; by default all ranks in a row.
        stamps: The result of stamping the model before it was sharded.
        reference: What values were compared with, in words, where that is what ids stand for.

    Raises:
        ShardvizError: No process group is initialized.
    """
    refuse_without_group("mark the test with @spmd(mesh=...), or pass the folder of a dump")
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    seen = Capture(rank, num_ranks, {stamp.name: stamp for stamp in stamps.stamps} if stamps else {})
    if mesh is not None:
        seen.add_mesh(mesh)
    add(seen)
    sent = of_all_ranks((msgspec.json.encode(seen.record()), save(seen.dense) if seen.dense else b""))
    records = map(partial(msgspec.json.decode, type=RankRecord), (record for record, _ in sent))
    arrays = {at: load(dense) for at, (_, dense) in enumerate(sent) if dense}
    run = run_record(_job_mesh(mesh), stamps, None, reference=reference)
    return dump_of(Gathered(Path("this job"), run, dict(enumerate(records)), arrays=arrays))


def _job_mesh(mesh: DeviceMesh | None) -> Mesh:
    return plain_mesh(mesh) if mesh is not None else Mesh(("rank",), (distributed.get_world_size(),))
