"""The dump of a running job: its folder is made before any rank captures, and complete on every rank afterwards."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from torch import distributed

from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.errors import DumpError
from shardviz.live.capture.agreement import agreed_run_id, of_all_ranks, raise_together, together
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.intended import check_intended
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import Stamped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.files import RankRecord, RunRecord
    from shardviz.live.capture.pipeline_parts import PipelinePart

    Sent: TypeAlias = tuple[RankRecord, Mapping[str, NDArray[np.generic]]]

MARK = ".run.json.tmp"
"""A file by which ranks know that they see the same folder: `run.json` replaces it."""

MAX_SENT = 64 << 20
"""Bytes of arrays that a rank sends to rank 0 where it does not reach its folder."""


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
    """Yield a capture to fill, then write it; all ranks have the folder before, and a complete one after.

    Raises:
        DumpError: The folder may not be replaced, or a rank cannot write its file.
        OtherRankError: Another rank raised; there is no folder then.
    """
    with together():
        check_intended(intended or {})
        refused = of_all_ranks(_refusal(folder, force=force) if distributed.get_rank() == 0 else None)[0]
        if refused is not None:
            raise refused
        try:
            yield from _filled(folder, mesh, part, intended, reference, command)
        except BaseException:
            if distributed.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _filled(
    folder: Path,
    mesh: DeviceMesh,
    part: PipelinePart,
    intended: Mapping[str, str] | None,
    reference: str,
    command: tuple[str, ...],
) -> Iterator[Capture]:
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    stamps = {stamp.name: stamp for stamp in part.stamps}
    seen = Capture(rank, num_ranks, stamps, run_id=agreed_run_id())
    is_shared = _is_reached(folder, seen)
    seen.add_mesh(mesh)
    yield seen
    command = command or tuple(sys.argv)
    stamped, run_id = Stamped(tuple(seen.stamps.values())), seen.run_id
    record = run_record(plain_mesh(mesh), stamped, intended, command=command, run_id=run_id, reference=reference)
    sent = of_all_ranks(None if is_shared else _sendable(seen))
    raise_together(_unwritten(folder, record, seen, is_shared=is_shared, sent=[one for one in sent if one]))


def _is_reached(folder: Path, seen: Capture) -> bool:
    """Whether this rank reaches the folder that rank 0 has made: each machine may have a disk of its own."""
    mark = folder / MARK
    if seen.rank == 0:
        with suppress(OSError):  # whoever writes next says why
            mark.write_text(seen.run_id)
    of_all_ranks(None)
    try:
        return seen.rank == 0 or mark.read_text(encoding="utf-8", errors="replace") == seen.run_id
    except OSError:
        return False


def _sendable(seen: Capture) -> Sent:
    """Return what rank 0 writes for a rank that does not reach its disk, without arrays that are too large to send."""
    record, size = seen.record(), sum(array.nbytes for array in seen.dense.values())
    if size <= MAX_SENT:
        return record, seen.dense
    tensors = tuple(one for one in record.tensors if not record.bodies[one.body].dense)
    why = (
        f"where its elements are: rank {seen.rank}, on {record.hostname}, does not reach the dump's folder, and its "
        f"{size:,} bytes of ids are more than the {MAX_SENT:,} that are sent: write to a folder that all machines share"
    )
    lost = tuple((key.partition("/")[2].partition("/")[2], why) for key in seen.dense)
    return msgspec.structs.replace(record, tensors=tensors, not_checked=(*record.not_checked, *lost)), {}


def _unwritten(
    folder: Path, record: RunRecord, seen: Capture, *, is_shared: bool, sent: Sequence[Sent]
) -> DumpError | None:
    """Write this rank's files, and on rank 0 those that were sent; return the error instead of raising it."""
    try:
        if seen.rank == 0:
            write_run(folder, record)
        if is_shared:
            write_rank(folder, seen.record(), seen.dense)
        for other, dense in sent if seen.rank == 0 else ():
            write_rank(folder, other, dense)
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
