"""Change the files of a made dump: what a damaged, partial or buggy run would have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shardviz.dump.records import RankRecord, RunRecord, TensorRecord
from shardviz.dump.write import RUN_FILE, rank_file, write_rank, write_run

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


def change_rank(folder: Path, rank: int, **fields: Any) -> None:
    record = read_rank(folder, rank)
    write_rank(folder, msgspec.structs.replace(record, **fields))


def change_run(folder: Path, **fields: Any) -> None:
    record = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunRecord)
    write_run(folder, msgspec.structs.replace(record, **fields))


def read_rank(folder: Path, rank: int) -> RankRecord:
    return msgspec.json.decode((folder / rank_file(rank)).read_bytes(), type=RankRecord)


def without(folder: Path, rank: int, name: str) -> None:
    """Take one tensor out of a rank's record."""
    tensors: tuple[TensorRecord, ...] = read_rank(folder, rank).tensors
    change_rank(folder, rank, tensors=tuple(tensor for tensor in tensors if tensor.name != name))
