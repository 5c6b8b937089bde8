"""The oracle agrees with what torch does on real ranks, where shards travel padded through gloo."""

from __future__ import annotations

import pytest

from shardviz.layout import Layout
from shardviz.live.world import launch
from shardviz.mesh import Mesh, parse_mesh
from shardviz.notation import parse, write
from shardviz.placements import Placement, Replicate, Shard, StridedShard

Case = tuple[tuple[int, ...], tuple[Placement, ...]]

MESH = parse_mesh("dp=2,fsdp=2,tp=2")

SCATTERED: list[Case] = [
    ((12, 8), (Shard(0), Shard(0), Shard(0))),
    ((12, 8), (Replicate(), StridedShard(0, 2), Shard(0))),
    ((5, 7), (Shard(1), Shard(0), Shard(1))),
    ((3,), (Shard(0), Shard(0), Shard(0))),
    ((2, 3, 5), (Shard(2), Shard(1), Shard(2))),
    ((0, 4), (Shard(0), Shard(1), Replicate())),
    ((), (Replicate(), Replicate(), Replicate())),
]

CUT_ON_EACH_RANK: list[Case] = [
    ((13, 3), (Replicate(), StridedShard(0, 2), Shard(0))),
    ((6,), (Replicate(), StridedShard(0, 2), Shard(0))),
    ((9, 2), (StridedShard(0, 3), Replicate(), Shard(0))),
    ((11, 4), (StridedShard(0, 4), StridedShard(0, 2), Shard(0))),
]
"""Uneven strided shards: torch 2.13.0 raises an AssertionError where it would have to pad them for a scatter."""


@pytest.mark.parametrize(("cases", "source"), [(SCATTERED, 0), (CUT_ON_EACH_RANK, None)], ids=["scattered", "cut"])
def test_distribute_tensor_gives_each_rank_what_the_layout_says(cases: list[Case], source: int | None):
    held = launch("tests.layout_tasks:distribute", (MESH, cases, source), num_ranks=MESH.size)
    for index, (shape, placements) in enumerate(cases):
        layout = Layout.from_placements(MESH, shape, placements)
        wanted = {rank: region.flat_ids(shape).ravel().tolist() for rank, region in layout.regions()}
        assert {rank: held[rank][index] for rank in range(MESH.size)} == wanted, (shape, placements)


def fsdp2_over(mesh: Mesh, sizes: list[int]) -> dict[int, tuple[dict[int, list[int]], Layout]]:
    """What FSDP2 makes of a dim that the other axes have split, by its size: every rank's rows, and its own label."""
    by_rank = launch("tests.layout_tasks:fsdp2_over", (mesh, sizes), num_ranks=mesh.size)
    found = {}
    for index, size in enumerate(sizes):
        (label,) = {held[index][1] for held in by_rank}
        rows = {rank: held[index][0] for rank, held in enumerate(by_rank)}
        found[size] = rows, Layout.from_placements(mesh, (size,), label)
    return found


def rows_of(layout: Layout) -> dict[int, list[int]]:
    return {rank: region.flat_ids(layout.shape).tolist() for rank, region in layout.regions()}


def test_fsdp2_over_tp_holds_what_its_label_says_even_and_uneven():
    mesh = parse_mesh("fsdp=2,tp=4")
    for size, (rows, label) in fsdp2_over(mesh, [12, 13, 5, 3]).items():
        assert write(label) == f"[{size}/tp/fsdp]"
        assert rows == rows_of(label)


def test_fsdp2_over_two_uneven_axes_holds_another_cut_than_its_label_says():
    """FSDP2 chunks level by level, and labels it with one split factor, the product of both axes' sizes.

    torch reads a split factor of 4 as 4 chunks of the whole dim. Chunks of chunks are other chunks where a size does
    not divide: of 5 rows, torch 2.13.0 puts row 3 on the rank whose label says row 4.
    """
    mesh = parse_mesh("fsdp=2,cp=2,tp=2")
    found = fsdp2_over(mesh, [8, 12, 7, 5])
    for size, (rows, _) in found.items():
        assert rows == rows_of(parse(f"[{size}/cp/tp/fsdp]").layout(mesh))
    assert [size for size, (rows, label) in found.items() if rows != rows_of(label)] == [5]
    assert write(found[12][1]) == "[12/cp/tp/fsdp]"
