"""Plans made without torch, for the tests of the offline half: any layouts, on the plan's mesh or on others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.records.files import PeakRecord, PlanPart, PlanRecord, RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, TensorRecord
from shardviz.dump.write import prepare_folder, write_plan, write_run
from shardviz.layout.mesh import Mesh
from shardviz.layout.notation import parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Planned = tuple[str, Mesh]
"""A layout, and the mesh of its tensor on the lowest rank."""


def make_plan(path: Path, mesh: Mesh, stages: Sequence[Mapping[str, Planned]]) -> Path:
    """Write a plan whose first axis has a part at each position, which has the tensors of a stage."""
    prepare_folder(path, force=True)
    write_run(path, RunRecord(1, "test", "none", mesh.size, mesh=_record(mesh)))
    one = len(stages) == 1
    parts = tuple(
        PlanPart(
            _rank(at * mesh.size // len(stages), mesh.size, tensors),
            {} if one else {mesh.axes[0]: (at,)},
            peak=PeakRecord(activations=3 << 20, gathered=1 << 20),
        )
        for at, tensors in enumerate(stages)
    )
    write_plan(path, PlanRecord(1, parts))
    return path


def shifted(mesh: Mesh, by: int) -> Mesh:
    """Return a mesh of later ranks."""
    return Mesh(mesh.axes, mesh.shape, tuple(rank + by for rank in mesh.ranks))


def _record(mesh: Mesh) -> MeshRecord:
    return MeshRecord(mesh.axes, mesh.shape, mesh.ranks)


def _rank(rank: int, num_ranks: int, tensors: Mapping[str, Planned]) -> RankRecord:
    meshes = list(dict.fromkeys(mesh for _, mesh in tensors.values()))
    claims = [(parse(text).layout(mesh), meshes.index(mesh)) for text, mesh in tensors.values()]
    layouts = [LayoutRecord(at, tuple(map(str, one.placements() or ())), one.shape) for one, at in claims]
    bodies = [
        Body("param", "initial", one.shape, one.region_of_rank(rank).shape, "float32", layout=number)
        for number, (one, _) in enumerate(claims)
    ]
    names = [TensorRecord(name, number) for number, name in enumerate(tensors)]
    return RankRecord(
        1, rank, num_ranks, "", tuple(map(_record, meshes)), (), tuple(layouts), tuple(bodies), tuple(names)
    )
