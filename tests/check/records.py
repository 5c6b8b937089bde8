"""Change the files of a made dump: what a damaged, partial or buggy run would have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardviz.dump.arrays import hash_of
from shardviz.dump.read import mesh_of
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, FlatRecord, LayoutRecord, TensorRecord
from shardviz.dump.write import RUN_FILE, rank_file, write_rank, write_run
from shardviz.layout.notation import parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from shardviz.dump.records.base import Role


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


def _as_written(values: NDArray[np.generic]) -> list[Any]:
    """Return values as nested lists in which `nan` and infinite ones are strings, as in a dump."""
    return np.where(np.isfinite(values), values.astype(object), values.astype(str)).tolist()


def add_values(
    folder: Path,
    name: str,
    claimed: str | None,
    values: Mapping[int, NDArray[np.generic]],
    *,
    role: Role = "param",
    constant: bool = False,
    written: bool = True,
) -> None:
    """Add a tensor's own values to the initial stage of a made dump; `written` puts them into the dump as numbers."""
    mesh = mesh_of(read_rank(folder, 0).meshes[0])
    layout = parse(claimed).layout(mesh) if claimed else None
    for rank, local in values.items():
        record = read_rank(folder, rank)
        layouts = list(record.layouts)
        if layout is not None:
            placements = layout.placements()
            assert placements is not None
            flat = FlatRecord(layout.flat.shape, layout.flat.offset) if layout.flat else None
            layouts.append(LayoutRecord(0, tuple(map(str, placements)), layout.shape, flat))
        body = Body(
            role,
            "initial",
            layout.tensor_shape if layout else local.shape,
            local.shape,
            str(local.dtype),
            layout=len(layouts) - 1 if layout else None,
            values=_as_written(local) if written else None,
            constant=constant,
        )
        tensor = TensorRecord(name, len(record.bodies), digests=hash_of(local, str(local.dtype), local.shape))
        change_rank(
            folder,
            rank,
            layouts=tuple(layouts),
            bodies=(*record.bodies, body),
            tensors=(*record.tensors, tensor),
        )
