"""The dump of a running job: its folder is made before any rank captures, and complete on every rank afterwards."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import distributed

from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.errors import DumpError
from shardviz.live.capture.agreement import agreed_run_id, of_all_ranks, raise_together
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.intended import check_intended
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import Stamped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records import RunRecord
    from shardviz.live.capture.pipeline_parts import PipelinePart


@contextmanager
def dump_of_job(
    folder: Path,
    mesh: DeviceMesh,
    part: PipelinePart,
    intended: Mapping[str, str] | None,
    *,
    force: bool,
    reference: str = "",
    command: tuple[str, ...] = (),
) -> Iterator[Capture]:
    """Yield a capture to fill, then write it; all ranks have the folder before, and a complete one after."""
    check_intended(intended or {})
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    refused = of_all_ranks(_refusal(folder, force=force) if rank == 0 else None)[0]
    if refused is not None:
        raise refused
    stamps = {stamp.name: stamp for stamp in part.stamps}
    seen = Capture(rank, num_ranks, stamps, run_id=agreed_run_id())
    seen.add_mesh(mesh)
    yield seen
    command = command or tuple(sys.argv)
    stamped, run_id = Stamped(tuple(seen.stamps.values())), seen.run_id
    record = run_record(plain_mesh(mesh), stamped, intended, command=command, run_id=run_id, reference=reference)
    raise_together(_unwritten(folder, record, seen))


def _unwritten(folder: Path, record: RunRecord, seen: Capture) -> DumpError | None:
    """Write this rank's files; return the error instead of raising it, as `_refusal` does."""
    try:
        if seen.rank == 0:
            write_run(folder, record)
        write_rank(folder, seen.record(), seen.dense)
    except DumpError as error:
        return _without_options(error)
    return None


def _refusal(folder: Path, *, force: bool) -> DumpError | None:
    """Make the folder; return the error instead of raising it, because ranks that wait for rank 0 would hang."""
    try:
        prepare_folder(folder, force=force)
    except DumpError as error:
        return _without_options(error)
    return None


def _without_options(error: DumpError) -> DumpError:
    """Return an error for somebody who typed no command."""
    return DumpError(error.message, error.hint.replace("--force", "force=True").replace(" with -o", ""))
