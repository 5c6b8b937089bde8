"""Dumps of a step, made without torch: each tensor's values by rank, beside what the unsharded model has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.run import check_step
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, TensorRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.explain.finding import Finding
from shardviz.layout.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardviz.dump.dump import Dump

MESH = Mesh(("dp", "tp"), (2, 2))
WANTED = np.array([[1.5, -2.0, 0.25, 3.0], [0.5, 1.0, -1.25, 2.0], [-0.75, 4.0, 1.0, 0.125], [2.5, -1.0, 3.5, 0.25]])
COPIES = ("Replicate()", "Replicate()")

Values = dict[int, Any]
Told = tuple[list[Finding], list[NotChecked]]


class Step:
    """A step's dump in the making: each tensor's values by rank, beside what the unsharded model has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bodies: dict[int, list[Body]] = {rank: [] for rank in MESH.ranks}
        self.names: dict[int, list[str]] = {rank: [] for rank in MESH.ranks}
        self.layouts: list[LayoutRecord] = []

    def add(
        self, name: str, role: Any, values: Mapping[int, Any], wanted: Any = WANTED, claim: tuple[str, ...] = COPIES
    ) -> Step:
        whole = np.asarray(wanted, np.float64)
        self.layouts.append(LayoutRecord(0, claim, whole.shape))
        for rank, held in values.items():
            self._put(rank, name, role, "step", held, len(self.layouts) - 1, whole.shape)
        self._put(0, name, role, "reference", whole, None, whole.shape)
        return self

    def put(self, rank: int, name: str, role: Any, stage: Any, held: Any, shape: Any = None) -> Step:
        self._put(rank, name, role, stage, held, None, shape or np.asarray(held).shape)
        return self

    def _put(self, rank: int, name: str, role: Any, stage: Any, held: Any, layout: int | None, shape: Any) -> None:
        array = np.asarray(held, np.float64)
        body = Body(role, stage, shape, array.shape, "float64", layout=layout, values=_nested(array))
        self.bodies[rank].append(body)
        self.names[rank].append(name)

    def check(self) -> Told:
        results = list(check_step(self.dump(), [], {}))
        findings = [one for one in results if isinstance(one, Finding)]
        return findings, [one for one in results if isinstance(one, NotChecked)]

    def dump(self) -> Dump:
        record = MeshRecord(MESH.axes, MESH.shape, MESH.ranks)
        folder = prepare_folder(self.path / "step")
        write_run(folder, RunRecord(1, "test", "none", MESH.size, mesh=record))
        for rank in MESH.ranks:
            tensors = tuple(TensorRecord(name, index) for index, name in enumerate(self.names[rank]))
            write_rank(
                folder,
                RankRecord(
                    1,
                    rank,
                    MESH.size,
                    "testhost",
                    meshes=(record,),
                    layouts=tuple(self.layouts),
                    bodies=tuple(self.bodies[rank]),
                    tensors=tensors,
                ),
            )
        return dump_of(read_files(folder))


def _nested(array: Any) -> Any:
    """Return nested lists as a dump writes them: JSON has no NaN and no infinity."""
    if array.ndim:
        return [_nested(row) for row in array]
    return float(array) if np.isfinite(array) else str(float(array))


def on_all(values: Any) -> Values:
    return dict.fromkeys(MESH.ranks, values)
