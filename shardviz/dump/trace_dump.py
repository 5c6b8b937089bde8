"""A dump for the trace of a single-process job without recorded weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.read import read_files
from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RankRecord
from shardviz.dump.write import write_rank, write_run

if TYPE_CHECKING:
    from pathlib import Path

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
