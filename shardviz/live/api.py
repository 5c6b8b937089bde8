"""The front door for users' own jobs: capture what every rank holds, or run a file as a probe."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture import Capture
    from shardviz.live.stamp import Stamped


def run_probe(file: str) -> None:
    """Run a file as a probe, as `shardviz probe FILE` does, with the command line's arguments; does not return.

    Under torchrun this process is one rank of that job; otherwise the ranks are launched.
    """
    from shardviz.cli import main

    sys.exit(main(["probe", file, *sys.argv[1:]]))


def capture(
    model: nn.Module,
    path: str | Path,
    *,
    mesh: DeviceMesh,
    stamps: Stamped | None = None,
    intended: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write a dump of what every rank holds of a model. Every rank of the job calls this.

    Args:
        model: The sharded model.
        path: The dump's folder, the same on every rank, on storage that all of them reach.
        mesh: The mesh of the job.
        stamps: What `shardviz.stamp` returned before the model was sharded; without it the model's own values are
            captured, and only copies can be compared.
        intended: Layouts in the notation, by pattern over names.
        force: Replace the folder, if it is a dump.

    Returns:
        The folder, complete on every rank.

    Raises:
        DumpError: The folder is there and may not be replaced.
        ShardvizError: No process group is initialised.
    """
    from torch import distributed

    from shardviz.live.capture import Capture, run_record
    from shardviz.live.meshes import plain_mesh

    if not distributed.is_initialized():
        raise ShardvizError("no process group is initialised", "call shardviz.capture in a rank of a distributed job")
    folder = Path(path)
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    if rank == 0:
        prepare_folder(folder, force=force)
    distributed.barrier()
    seen = Capture(rank, num_ranks, {stamp.name: stamp for stamp in stamps.stamps} if stamps else {})
    seen.add_mesh(mesh)
    add_model(seen, model, mesh, stamps)
    if rank == 0:
        write_run(folder, run_record(plain_mesh(mesh), stamps, intended, command=tuple(sys.argv)))
    write_rank(folder, seen.record(), seen.dense)
    distributed.barrier()
    return folder


def add_model(seen: Capture, model: nn.Module, mesh: DeviceMesh | None, stamps: Stamped | None) -> None:
    """Capture a model's parameters and buffers: the ids of a stamped one, the values of another.

    Args:
        seen: What this rank has to say.
        model: The sharded model.
        mesh: The mesh of the job, if there is one.
        stamps: What stamping did before the model was sharded.
    """
    from shardviz.live import describe
    from shardviz.live.capture import local_tensors
    from shardviz.live.meshes import plain_mesh
    from shardviz.live.stamp import exact_bits

    seen.add_ties(model)
    seen.add_meshes(model)
    if stamps is not None:
        seen.not_applied += stamps.not_applied
        seen.not_checked += stamps.not_stamped
    last = max((stamp.first + math.prod(stamp.shape) - 1 for stamp in stamps.stamps), default=0) if stamps else 0
    for local in local_tensors(model, plain_mesh(mesh) if mesh is not None else None):
        if stamps is None:
            seen.add_values(local, "initial")
        elif last < 2 ** exact_bits(local.values.dtype):
            seen.add_ids(local, describe.ids_of(local.values, last))
        else:
            seen.not_checked.append((local.name, f"ids to {last:,} are not exact in {local.values.dtype}"))
