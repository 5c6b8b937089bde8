"""The front door for users' own jobs: capture what every rank holds, or run a file as a probe."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.errors import DumpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.pipeline_parts import PipelinePart
    from shardviz.live.capture.stamp import Stamped

WIDER = (
    "what to do about ids that are not exact: for this one run stamp the model in float64, model.double() before "
    "shardviz.stamp; or let shardviz.capture_sharding(build, parallelize, ...) write them a digit a pass"
)


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
    stage_axes: Sequence[str] = (),
    intended: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write a dump of what every rank holds of a model. Every rank of the job calls this.

    Args:
        model: The sharded model; of a pipeline, this rank's stage.
        path: The dump's folder, the same on every rank, on storage that all of them reach.
        mesh: The mesh of the whole job.
        stamps: What `shardviz.stamp` returned before the model was sharded; without it the model's own values are
            captured, and only copies can be compared.
        stage_axes: The mesh axes along which ranks have different layers: `("pp",)`. A stage may be cut from a model
            that was stamped whole, or be built and stamped by itself.
        intended: Layouts in the notation, by pattern over names.
        force: Replace the folder, if it is a dump.

    Returns:
        The folder, complete on every rank.

    Raises:
        DumpError: The folder is there and may not be replaced; every rank raises it.
        MeshError: The mesh has no such axis.
        ShardvizError: No process group is initialised, or ranks of one stage stamped different tensors.
    """
    from shardviz.live.capture.agreement import refuse_without_group
    from shardviz.live.capture.locals import local_tensors, unwrapped
    from shardviz.live.capture.meshes import plain_mesh
    from shardviz.live.capture.pipeline_parts import agree

    refuse_without_group("call shardviz.capture in a rank of a distributed job")
    names = [local.name for local in local_tensors(unwrapped(model))]
    part = agree(plain_mesh(mesh), stage_axes, stamps.stamps if stamps else (), names)
    with _dump(Path(path), mesh, part, intended, force=force) as seen:
        if add_model(seen, unwrapped(model), mesh, stamps, part):
            seen.not_checked.append(("", WIDER))
    return Path(path)


def capture_sharding(
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None],
    path: str | Path,
    *,
    mesh: DeviceMesh,
    stage_axes: Sequence[str] = (),
    intended: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write a dump of what `parallelize` makes of a model in any dtype. Every rank of the job calls this.

    It builds and shards the model several times: once as it is, for its own values, and then stamped, in float64, or,
    where sharding casts it to a narrower dtype, a digit of the ids a pass. Random states are left as they were.

    Args:
        build: Makes the unsharded model, or this rank's stage of a pipeline; with values, not on the meta device.
        parallelize: Shards it, in place or returning it, as a probe's does.
        path: The dump's folder, the same on every rank, on storage that all of them reach.
        mesh: The mesh of the whole job.
        stage_axes: As for `capture`.
        intended: Layouts in the notation, by pattern over names.
        force: Replace the folder, if it is a dump.

    Returns:
        The folder, complete on every rank.

    Raises:
        DumpError: The folder is there and may not be replaced; every rank raises it.
        MeshError: The mesh has no such axis.
        ShardvizError: As `capture` and `stamp`.
    """
    import torch

    from shardviz.live.capture.agreement import refuse_without_group
    from shardviz.live.capture.locals import local_tensors, unwrapped
    from shardviz.live.capture.meshes import plain_mesh
    from shardviz.live.capture.passes import Sharding, capture_passes
    from shardviz.live.capture.pipeline_parts import agree
    from shardviz.live.capture.stamp import plan

    def sharded(model: nn.Module) -> nn.Module:
        returned = parallelize(model, mesh)
        return model if returned is None else returned

    refuse_without_group("call shardviz.capture_sharding in a rank of a distributed job")
    with torch.random.fork_rng():
        model = build()
        stamps = plan(model)
        model = sharded(model)
        names = [local.name for local in local_tensors(unwrapped(model))]
        part = agree(plain_mesh(mesh), stage_axes, stamps, names)
        with _dump(Path(path), mesh, part, intended, force=force) as seen:
            add_model(seen, unwrapped(model), mesh, None, part)
            del model
            capture_passes(seen, Sharding(build, sharded, plain_mesh(mesh)), part)
    return Path(path)


def add_model(
    seen: Capture, model: nn.Module, mesh: DeviceMesh | None, stamps: Stamped | None, part: PipelinePart | None = None
) -> int:
    """Capture a model's parameters and buffers: the ids of a stamped one, the values of another.

    Args:
        seen: What this rank has to say.
        model: The sharded model.
        mesh: The mesh of the job, if there is one.
        stamps: What stamping did before the model was sharded.
        part: What the model is to the dump, where it is not all of it.

    Returns:
        How many tensors could not hold their ids.
    """
    from shardviz.live.capture.locals import local_tensors
    from shardviz.live.capture.meshes import plain_mesh
    from shardviz.live.capture.passes import add_ids
    from shardviz.live.capture.pipeline_parts import PipelinePart

    part = part or PipelinePart()
    seen.add_ties(model, part.prefix)
    seen.add_meshes(model)
    locals_ = part.own(local_tensors(model, plain_mesh(mesh) if mesh is not None else None))
    for local in locals_:
        if stamps is None or local.name not in seen.stamps:
            seen.add_values(local, "initial")
    return add_ids(seen, locals_, stamps, part) if stamps is not None else 0


@contextmanager
def _dump(
    folder: Path, mesh: DeviceMesh, part: PipelinePart, intended: Mapping[str, str] | None, *, force: bool
) -> Iterator[Capture]:
    """Give a capture to fill, and write it; the folder is there on all ranks before and complete after."""
    from torch import distributed

    from shardviz.live.capture.agreement import agreed_run_id, of_all_ranks
    from shardviz.live.capture.capture import Capture, run_record
    from shardviz.live.capture.intended import check_intended
    from shardviz.live.capture.meshes import plain_mesh
    from shardviz.live.capture.stamp import Stamped

    check_intended(intended or {})
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    refused = of_all_ranks(_refusal(folder, force=force) if rank == 0 else None)[0]
    if refused is not None:
        raise refused
    stamps = {stamp.name: stamp for stamp in part.stamps}
    seen = Capture(rank, num_ranks, stamps, run_id=agreed_run_id())
    seen.add_mesh(mesh)
    yield seen
    if rank == 0:
        command = tuple(sys.argv)
        record = run_record(plain_mesh(mesh), Stamped(part.stamps), intended, command=command, run_id=seen.run_id)
        write_run(folder, record)
    write_rank(folder, seen.record(), seen.dense)
    distributed.barrier()


def _refusal(folder: Path, *, force: bool) -> DumpError | None:
    """Make the folder; return why that cannot be, for all ranks to raise: those that wait for rank 0 would hang."""
    try:
        prepare_folder(folder, force=force)
    except DumpError as error:
        return DumpError(error.message, error.hint.replace("--force", "force=True").replace(" with -o", ""))
    return None
