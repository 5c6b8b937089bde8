"""Dumps made without torch, for the tests of the offline half: any claimed layout, any held one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, FlatRecord, LayoutRecord, MeshRecord, Position, Stamp, TensorRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.layout.notation import parse
from shardviz.text import fold

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh


@dataclass
class Made:
    """One tensor of a made dump.

    Attributes:
        claimed: What its placements say, in the notation; None for a plain tensor.
        held: What it holds, in the notation; as claimed by default.
        ids: For some ranks the local ids, from 1 within the tensor, instead of `held`.
        shape: The global shape of a plain tensor.
    """

    claimed: str | None
    held: str | None = None
    ids: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    shape: tuple[int, ...] = ()


def make_dump(path: Path, mesh: Mesh, tensors: Mapping[str, Made | str]) -> Path:
    """Write a dump of stamped tensors on one mesh; a string is a tensor that holds what it claims."""
    made = {name: tensor if isinstance(tensor, Made) else Made(tensor) for name, tensor in tensors.items()}
    prepare_folder(path, force=True)
    record = MeshRecord(mesh.axes, mesh.shape, mesh.ranks)
    stamps, first = [], 1
    for name, tensor in made.items():
        shape = _layout(tensor, mesh).tensor_shape
        stamps.append(Stamp(name, first, shape))
        first += math.prod(shape)
    write_run(path, RunRecord(1, "test", "none", mesh.size, mesh=record, stamps=tuple(stamps)))
    for rank in mesh.ranks:
        write_rank(path, _rank_record(rank, mesh, record, made, {stamp.name: stamp.first for stamp in stamps}))
    return path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in the place of one that may be there, at once: the disk is waited for where one is cut short."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _layout(tensor: Made, mesh: Mesh) -> Layout:
    text = tensor.claimed or tensor.held
    return parse(text or f"[{', '.join(map(str, tensor.shape))}]").layout(mesh)


def _rank_record(
    rank: int, mesh: Mesh, record: MeshRecord, made: Mapping[str, Made], first: Mapping[str, int]
) -> RankRecord:
    bodies: dict[Body, int] = {}
    layouts: dict[LayoutRecord, int] = {}
    named = []
    for name, tensor in made.items():
        body = _body(rank, tensor, mesh, first[name], layouts)
        named.append((name, bodies.setdefault(body, len(bodies))))
    coord = mesh.coord_of(rank)
    return RankRecord(
        schema=1,
        rank=rank,
        num_ranks=mesh.size,
        hostname="testhost",
        meshes=(record,),
        positions=(Position(0, coord, coord),),
        layouts=tuple(layouts),
        bodies=tuple(bodies),
        tensors=tuple(TensorRecord(f.prefix, body, f.numbers, f.suffix) for f, body in fold(named)),
    )


def _body(rank: int, tensor: Made, mesh: Mesh, first: int, layouts: dict[LayoutRecord, int]) -> Body:
    claimed = _layout(tensor, mesh)
    index = None
    if tensor.claimed is not None:
        placements = claimed.placements()
        assert placements is not None, f"torch cannot say {tensor.claimed}"
        flat = FlatRecord(claimed.flat.shape, claimed.flat.offset) if claimed.flat else None
        claim = LayoutRecord(0, tuple(map(str, placements)), claimed.shape, flat)
        index = layouts.setdefault(claim, len(layouts))
    dtype = parse(tensor.claimed or "[]").dtype or "float32"
    shape = claimed.tensor_shape
    if rank in tensor.ids:
        ids = tensor.ids[rank]
        runs = tuple((int(i + first - 1 if i > 0 else i), 0, 1) for i in ids.ravel())
        return Body("param", "stamped", shape, ids.shape, dtype, layout=index, runs=runs)
    held = parse(tensor.held).layout(mesh) if tensor.held else claimed
    region = held.region_of_rank(rank)
    return Body("param", "stamped", shape, region.shape, dtype, layout=index, held=region.dims)
