"""Dumps made of others: of the parts that machines without a shared disk wrote, or around a trace without weights."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.read import plain_file, read_files
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RankRecord
from shardviz.dump.write import TRACE_FOLDER, dense_file, rank_file, replacing_folder, write_rank, write_run
from shardviz.errors import DumpError
from shardviz.text import named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardviz.dump.read import DumpFiles

MOST_RANKS = 8
"""Ranks that a message names one by one."""


def read_parts(
    folders: Sequence[Path], *, strict: bool = True, on_progress: Callable[[int, int], None] | None = None
) -> DumpFiles:
    """Read the parts of a dump as one; the part with the lowest rank gives the run's record.

    Args:
        folders: The parts; a single one may be any dump.
        strict: Raise on the first damaged rank file; otherwise note it and read the rest.
        on_progress: Called with the number of ranks read and the number of rank files, part by part.

    Raises:
        DumpError: A part is not a dump or is damaged, two have the same rank, or they are of different runs.
    """
    first, *others = (read_files(folder, strict=strict, on_progress=on_progress) for folder in folders)
    if not others:
        return first
    folder_of: dict[int, Path] = {}
    for dump_part in (first, *others):
        _refuse_plan(dump_part)
        _refuse_different_run(dump_part, first)
        for rank in (*dump_part.ranks, *dump_part.damaged):
            if rank in folder_of:
                first_part, second_part = _name_of(folder_of[rank]), _name_of(dump_part.path)
                is_twice = first_part == second_part
                where = f"{first_part}, which is given twice" if is_twice else f"both {first_part} and {second_part}"
                raise DumpError(f"rank {rank} is in {where}", "give each machine's folder once")
            folder_of[rank] = dump_part.path
    parts = sorted((first, *others), key=lambda part: min((*part.ranks, *part.damaged), default=part.run.num_ranks))
    return replace(
        parts[0],
        ranks={rank: record for part in parts for rank, record in part.ranks.items()},
        damaged={rank: why for part in parts for rank, why in part.damaged.items()},
        changed=frozenset().union(*(part.changed for part in parts)),
        refused=frozenset().union(*(part.refused for part in parts)),
        folder_of=folder_of,
    )


def gather(folders: Sequence[Path], output: Path, *, force: bool = False) -> DumpFiles:
    """Copy the parts of a dump, with the trace of a step that they may have, into one folder.

    Args:
        force: Replace the folder if it is a dump.

    Returns:
        What was read.

    Raises:
        DumpError: As `read_parts`; a rank is in none of the parts, or the folder may not be replaced.
    """
    if output.resolve() in [folder.resolve() for folder in folders]:
        raise DumpError(f"{_name_of(output)} is one of the parts", "give another folder with -o")
    files = read_parts(folders)
    _refuse_plan(files)
    if missing := files.missing_ranks:
        verb = "is" if len(missing) == 1 else "are"
        raise DumpError(
            f"{len(missing):,} of {files.run.num_ranks:,} ranks {verb} missing: {named_ranks(missing, MOST_RANKS)} "
            f"{verb} not in {', '.join(map(_name_of, folders))}",
            "give the folders of their machines, too; without them: "
            f"shardviz check {printable(shlex.join(map(str, folders)))}",
        )
    with replacing_folder(output, force=force) as unfinished:
        _copy(files, unfinished)
        traces = [folder / TRACE_FOLDER for folder in folders if _has_trace(folder)]
        if traces:
            (unfinished / TRACE_FOLDER).mkdir()
            _copy(read_parts(traces), unfinished / TRACE_FOLDER)
    return files


def _refuse_plan(files: DumpFiles) -> None:
    if files.planned is not None:
        raise DumpError(
            f"{_name_of(files.path)} is a plan, which has no parts", "give what the machines of a job wrote"
        )


def _refuse_different_run(dump_part: DumpFiles, first: DumpFiles) -> None:
    """Raise DumpError unless both are parts of one run."""
    names = f"{_name_of(first.path)} and {_name_of(dump_part.path)}"
    if dump_part.run.run_id != first.run.run_id:
        ids = f"{first.run.run_id or 'no id'} and {dump_part.run.run_id or 'no id'}"
        raise DumpError(f"{names} are of two different runs: {ids}", "give the folders that one job has written")
    if not first.run.run_id:
        raise DumpError(f"{names} do not say of which run they are", "run the job again with this shardviz")
    for field in ("num_ranks", "mesh", "stamps", "intended"):
        if getattr(dump_part.run, field) != getattr(first.run, field):
            raise DumpError(f"{names} differ in {field} of run.json: one of them is damaged", "copy both again")


def _has_trace(folder: Path) -> bool:
    """Whether a part has the trace of a step.

    Raises:
        DumpError: A link is in its place.
    """
    trace = folder / TRACE_FOLDER
    if trace.is_symlink():
        raise DumpError(f"{_name_of(trace)} is a link", "a dump's files are plain files; copy the target here")
    return trace.is_dir()


def _copy(files: DumpFiles, folder: Path) -> None:
    """Copy the files of each rank; links are never followed."""
    write_run(folder, files.run)
    for rank in files.ranks:
        for name in (rank_file(rank), dense_file(rank)):
            source = plain_file(files.folder(rank), name)
            if source.exists():
                shutil.copyfile(source, folder / name, follow_symlinks=False)


def _name_of(path: Path) -> str:
    return printable(str(path))


NO_WEIGHTS = "where weights are: no sharding call was seen, and only a step was traced"


def write_around(trace: Path, folder: Path) -> None:
    """Write the files of a dump without weights into a folder, for the run whose trace this is.

    Raises:
        DumpError: The trace is damaged, or a file cannot be written.
    """
    traced = read_files(trace)
    write_run(folder, traced.run)
    for rank, record in traced.ranks.items():
        empty_record = RankRecord(SCHEMA, rank, record.num_ranks, record.hostname, not_checked=(("", NO_WEIGHTS),))
        write_rank(folder, structs.replace(empty_record, run_id=record.run_id))
