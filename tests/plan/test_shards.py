"""What a plan says of all ranks at once is what it says of each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.dump.tensor import Tensor
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.picture.model.palette import HUES, SHADES, Coloring
from shardviz.picture.model.sides import sides_of
from tests.plans import make_plan, shifted

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = parse_mesh("pp=2,fsdp=3,tp=2")
STAGE = parse_mesh("fsdp=3,tp=2")
FLAT = parse_mesh("fsdp_tp=6")
TP = parse_mesh("tp=2")
OF_A_STAGE = {
    "even.weight": ("[12/tp/fsdp, 4]", STAGE),
    "uneven.weight": ("[7/fsdp, 5/tp]", STAGE),
    "whole.weight": ("[3, 4]", STAGE),
    "flat.weight": ("[8/fsdp_tp, 2]", FLAT),
    "tp.weight": ("[3, 3/tp]", TP),
}
MOVED = {name: (text, shifted(mesh, 6)) for name, (text, mesh) in OF_A_STAGE.items()}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    everywhere = {"everywhere.weight": ("[13/fsdp/tp, 2]", WHOLE)}
    return make_plan(tmp_path / "plan", WHOLE, [OF_A_STAGE | everywhere, MOVED | everywhere])


def test_claims_and_shapes_are_those_of_every_rank(plan: Path) -> None:
    for tensor in dump_of(read_files(plan)).tensors:
        each = Tensor(tensor.fold, tensor.role, tensor.moment, dict(tensor.shards))
        assert tensor.claims == each.claims
        assert tensor.distinct == each.distinct
        assert tensor.first == each.first


def test_a_group_of_tensor_parallelism_has_a_layout_of_its_own(plan: Path) -> None:
    (tensor,) = (one for one in dump_of(read_files(plan)).tensors if one.name == "tp.weight")
    assert list(tensor.claims.values()) == [(at, at + 1) for at in range(0, 12, 2)]


def test_the_map_of_a_planned_tensor_shows_what_each_rank_claims(plan: Path) -> None:
    dump = dump_of(read_files(plan))
    for tensor in dump.tensors:
        sides = sides_of(dump, tensor)
        for index in np.ndindex(*tensor.shape):
            holders = [
                rank
                for rank, shard in tensor.shards.items()
                if shard.layout is not None
                and all(
                    any(start <= at < stop for start, stop in ranges)
                    for at, ranges in zip(index, shard.layout.region_of_rank(rank).dims, strict=True)
                )
            ]
            assert sides.at(index).claimed == sum(1 << rank for rank in holders)


def test_ranks_that_share_a_part_of_an_outer_axis_share_a_hue() -> None:
    mesh = parse_mesh("pp=4,fsdp=16,tp=8")
    colors = {rank: Coloring(mesh).color(rank) for rank in mesh.ranks}
    hues = {rank: color // SHADES for rank, color in colors.items()}
    assert [hues[rank] for rank in mesh.group_of(0, "pp")] == [at * HUES // 4 for at in range(4)]
    assert {hues[rank] for rank in mesh.group_of(0, "fsdp", "tp")} == {0}
    assert [colors[rank] for rank in range(4)] == [0, 1, 0, 1]  # neighbors along tp differ in their shade
    split = Coloring(mesh, ("tp",))
    assert [split.color(rank) // SHADES for rank in range(8)] == list(range(HUES))
    assert {split.color(rank) for rank in mesh.group_of(3, "pp", "fsdp")} == {3 * SHADES}


def test_comparing_layouts_of_sixteen_thousand_ranks_takes_no_loop_over_them() -> None:
    mesh = parse_mesh("fsdp=2048,tp=8")
    one, other = (parse(text).layout(mesh) for text in ("[128256/tp/fsdp, 64]", "[128256/fsdp/tp, 64]"))
    assert not one.same_regions(other)
    assert one.local_shapes().prod(axis=1).sum() == 128256 * 64
