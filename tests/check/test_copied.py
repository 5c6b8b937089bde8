"""Buffers that are copies of a weight: the weight's ids are their own, unless the two differed before sharding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.check.order.case import as_own, counted_from
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, Position, Stamp, TensorRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Role
    from shardviz.dump.records.tensors import Held

SHAPE = (4, 2)
OWN: Held = (((0, 4),), ((0, 2),))
ONE, OTHER = "0" * 16, "1" * 16


def made(
    path: Path, *, digest: str = ONE, role: Role = "buffer", constant: bool = False, weight: Held | None = OWN
) -> Dump:
    """Return the dump of one rank: a weight `w`, and `average`, which had a digest of its own before sharding."""
    mesh = MeshRecord(("dp",), (1,), (0,))
    layout = LayoutRecord(0, ("Shard(0)",), SHAPE)
    runs = ((9, 0, 8),) if weight is None else None
    bodies = (
        Body("param", "stamped", SHAPE, SHAPE, "float32", layout=0, held=weight, runs=runs),
        Body(role, "stamped", SHAPE, SHAPE, "float32", layout=0, runs=((1, 1, 8),)),
        Body("param", "reference", SHAPE, SHAPE, "float32", constant=constant),
        Body(role, "reference", SHAPE, SHAPE, "float32", constant=constant),
    )
    tensors = (
        TensorRecord("w", 0),
        TensorRecord("average", 1),
        TensorRecord("w", 2, digests=ONE),
        TensorRecord("average", 3, digests=digest),
    )
    folder = prepare_folder(path / "made.shardviz")
    stamps = (Stamp("w", 1, SHAPE), Stamp("average", 9, SHAPE, role))
    write_run(folder, RunRecord(1, "test", "none", 1, mesh=mesh, stamps=stamps))
    positions = (Position(0, (0,), (0,)),)
    record = RankRecord(
        1, 0, 1, "testhost", meshes=(mesh,), positions=positions, layouts=(layout,), bodies=bodies, tensors=tensors
    )
    write_rank(folder, record)
    return dump_of(read_files(folder))


def test_the_ids_of_a_weight_are_those_of_a_buffer_that_was_its_copy(tmp_path: Path) -> None:
    dump = made(tmp_path)
    of_weight = np.array([[-4, -5], [-2, -3]])
    assert as_own(dump, "average", of_weight).tolist() == [[3, 4], [1, 2]]
    assert counted_from(dump, dump.stamps["average"], 1, 8) == 1


@pytest.mark.parametrize(
    "different",
    [
        {"digest": OTHER},  # another tensor before sharding
        {"digest": ""},  # nothing is known of it
        {"constant": True},  # ones, as all norms start with
        {"role": "param"},  # two weights that start alike, and are trained
        {"weight": None},  # exchanged: the weight has the average's ids
    ],
)
def test_the_ids_of_a_weight_stay_foreign_to_all_else(tmp_path: Path, different: dict[str, object]) -> None:
    dump = made(tmp_path, **different)  # type: ignore[arg-type]
    of_weight = np.array([[-4, -5], [-2, -3]])
    assert as_own(dump, "average", of_weight) is of_weight
    assert counted_from(dump, dump.stamps["average"], 1, 8) == 9


@pytest.mark.parametrize("ids", [[-2, -10], [-2, 0], [-2, -1], [1, 2]])
def test_ids_of_several_tensors_are_left_as_they_are(tmp_path: Path, ids: list[int]) -> None:
    held = np.array(ids)
    assert as_own(made(tmp_path), "average", held) is held
