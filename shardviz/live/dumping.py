"""A running job's dump: folders exist before any rank captures, and are complete after.

Ranks whose machines share a disk share a folder; each machine with a disk of its own keeps the files of its own ranks.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING

from torch import distributed

from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.errors import DumpError, NotationError
from shardviz.layout.notation import parse_intended
from shardviz.live.capture.agreement import agreed_run_id, of_all_ranks, raise_together, together
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.meshes import plain_mesh

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.files import RunRecord
    from shardviz.live.capture.pipeline_parts import PipelinePart


@contextmanager
def dump_of_job(
    folder: Path,
    mesh: DeviceMesh,
    pipeline_part: PipelinePart,
    intended: Mapping[str, str] | None,
    *,
    force: bool,
    reference: str = "",
    command: tuple[str, ...] = (),
) -> Iterator[Capture]:
    """Yield a capture to fill, then write it; every rank ends up with a complete folder.

    Raises:
        DumpError: A folder may not be replaced, or a rank cannot write its file.
        OtherRankError: Another rank raised; there is no folder then.
    """
    with together():
        check_intended(intended or {})
        capture = Capture(
            distributed.get_rank(),
            distributed.get_world_size(),
            {stamp.name: stamp for stamp in pipeline_part.stamps},
            run_id=agreed_run_id(),
        )
        try:
            is_maker = made_folder(folder, capture.run_id, force=force)
        except DumpError as error:
            raise _without_options(error) from None
        try:
            capture.add_mesh(mesh)
            yield capture
            record = run_record(
                capture.num_ranks,
                plain_mesh(mesh),
                command or tuple(sys.argv),
                run_id=capture.run_id,
                reference=reference,
                stamps=tuple(capture.stamps.values()),
                intended=intended,
            )
            raise_together(_unwritten(folder, record if is_maker else None, capture))
        except BaseException:
            if is_maker:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def made_folder(folder: Path, run_id: str, *, force: bool) -> bool:
    """Make the dump's folder on one rank per machine or shared disk. Every rank calls this.

    Returns:
        Whether this rank made it, and writes what is true of the whole run.

    Raises:
        DumpError: Something is there that may not be replaced; every rank raises it.
    """
    rank = distributed.get_rank()
    marks = [folder.with_name(f".{folder.name}.{run_id}.{number}.tmp") for number in range(rank + 1)]
    try:
        with suppress(OSError, ValueError):  # whoever makes the folder says why
            folder.parent.mkdir(parents=True, exist_ok=True)
            marks[rank].touch()
        of_all_ranks(None)
        is_maker = not any(map(os.path.exists, marks[:rank]))
        refused = of_all_ranks(_refusal(folder, force=force) if is_maker else None)
    finally:
        with suppress(OSError, ValueError):
            marks[rank].unlink(missing_ok=True)
    for error in filter(None, refused):
        raise error
    return is_maker


def _refusal(folder: Path, *, force: bool) -> DumpError | None:
    """Make the folder and return any error: ranks that wait for this one would hang."""
    try:
        prepare_folder(folder, force=force)
    except DumpError as error:
        return error
    return None


def _unwritten(folder: Path, record: RunRecord | None, capture: Capture) -> DumpError | None:
    """Write this rank's files, and the run's if given; return an error instead of raising it."""
    try:
        if record is not None:
            write_run(folder, record)
        write_rank(folder, capture.record(), capture.dense)
    except DumpError as error:
        return _without_options(error)
    return None


def _without_options(error: DumpError) -> DumpError:
    """Return an error for somebody who typed no command."""
    return DumpError(error.message, error.hint.replace("--force", "force=True").replace(" with -o", ""))


HINT = 'write a layout as text: {"*.weight": "[*/tp/fsdp, *]"}'


def check_intended(intended: object) -> None:
    """Check that every expected layout can be read.

    Axes are not checked: a flattened mesh, with its axis, may be made later.

    Args:
        intended: Layouts in the notation, by pattern over names.

    Raises:
        NotationError: It is not a dictionary, or a layout in it is not text or cannot be read.
    """
    if not isinstance(intended, Mapping):
        raise NotationError(f"expect is a {type(intended).__name__}, not a dictionary of layouts by name", HINT)
    for pattern, text in intended.items():
        if not isinstance(text, str):
            raise NotationError(f"the layout expected for {pattern!r} is a {type(text).__name__}, not text", HINT)
        try:
            parse_intended(text)
        except NotationError as error:
            raise NotationError(f"the layout expected for {pattern!r}: {error.message}", error.hint) from error


def check_axes(intended: Mapping[str, str], axes: Sequence[str]) -> None:
    """Check that every named axis exists, once the model is sharded and its meshes are known.

    Args:
        axes: The axes of the run's meshes, flattened ones among them.

    Raises:
        NotationError: An axis is on no mesh; the hint names the one that is meant.
    """
    for pattern, text in intended.items():
        for axis in parse_intended(text).axes:
            if axis not in axes:
                close = get_close_matches(axis, axes, n=1)
                hint = f"did you mean {close[0]}?" if close else f"the axes are {', '.join(axes)}"
                raise NotationError(
                    f"the layout expected for {pattern!r}: {text} names {axis}, which is not an axis of any mesh", hint
                )
