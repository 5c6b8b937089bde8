"""Jobs' dumps made without torch: real numbers, cut as one layout claims and as another one cuts, with their hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.arrays import hash_of
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, Position, TensorRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh


@dataclass(frozen=True)
class Held:
    """One tensor of a job.

    Attributes:
        whole: Its values.
        claimed: What its placements say, in the notation; None for a plain tensor, a copy on every rank.
        held: What ranks have, in the notation; as claimed by default.
        of_rank: What some ranks have instead.
        values: Whether the dump has the values besides their hash.
        dtype: The dtype, where numpy has none of it.
        role: What it is to the model.
        ranks: The ranks that have it; all by default.
    """

    whole: NDArray[Any]
    claimed: str | None = None
    held: str = ""
    of_rank: Mapping[int, NDArray[Any]] = field(default_factory=dict)
    values: bool = False
    dtype: str = ""
    role: Any = "param"
    ranks: tuple[int, ...] = ()


def job(path: Path, mesh: str, tensors: Mapping[str, Held], *, tied: tuple[tuple[str, ...], ...] = ()) -> Path:
    """Write the dump that `shardviz.capture` of such a job writes."""
    prepare_folder(path, force=True)
    grid = parse_mesh(mesh)
    record = MeshRecord(grid.axes, grid.shape, grid.ranks)
    write_run(path, RunRecord(1, "test", "none", grid.size, mesh=record))
    for rank in grid.ranks:
        own = {name: one for name, one in tensors.items() if not one.ranks or rank in one.ranks}
        layouts = tuple(dict.fromkeys(_layout(one, grid) for one in own.values() if one.claimed))
        bodies = [_body(rank, one, grid, layouts) for one in own.values()]
        write_rank(
            path,
            RankRecord(
                schema=1,
                rank=rank,
                num_ranks=grid.size,
                hostname="testhost",
                meshes=(record,),
                positions=(Position(0, grid.coord_of(rank), grid.coord_of(rank)),),
                layouts=layouts,
                bodies=tuple(body for body, _ in bodies),
                tensors=tuple(TensorRecord(name, at, digests=bodies[at][1]) for at, name in enumerate(own)),
                tied=tied,
            ),
        )
    return path


def _layout(one: Held, mesh: Mesh) -> LayoutRecord:
    layout = parse(one.claimed or "").layout(mesh)
    placements = layout.placements()
    assert placements is not None
    return LayoutRecord(0, tuple(map(str, placements)), layout.shape)


def _body(rank: int, one: Held, mesh: Mesh, layouts: tuple[LayoutRecord, ...]) -> tuple[Body, str]:
    index = layouts.index(_layout(one, mesh)) if one.claimed else None
    if rank in one.of_rank:
        local = one.of_rank[rank]
    elif one.claimed:
        local = part_of(one.whole, parse(one.held or one.claimed).layout(mesh).region_of_rank(rank))
    else:
        local = one.whole
    dtype = one.dtype or str(local.dtype)
    shape = parse(one.claimed).layout(mesh).shape if one.claimed else local.shape
    body = Body(
        one.role,
        "initial",
        shape,
        local.shape,
        dtype,
        layout=index,
        values=local.tolist() if one.values else None,
        constant=bool(local.size and (local == local.flat[0]).all()),
    )
    return body, hash_of(np.ascontiguousarray(local), dtype, local.shape)
