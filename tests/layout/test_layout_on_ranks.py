"""The oracle agrees with what torch does on real ranks, where shards travel padded through gloo."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributed, nn
from torch.distributed import tensor as dtensor
from torch.distributed.fsdp import fully_shard

from shardviz.layout.layout import Layout
from shardviz.layout.notation import parse, write
from shardviz.layout.placements import Placement, Replicate, Shard, StridedShard
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.compat.meshes import placement_of
from shardviz.testing import spmd
from tests.lanes import at_night, nightly
from tests.layout.spelling import in_torch

Case = tuple[tuple[int, ...], tuple[Placement, ...]]

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


def rows_of(layout: Layout) -> list[int]:
    """What this rank holds by a layout, as row-major indices."""
    own = layout.region_of_rank(distributed.get_rank())
    return own.flat_ids(layout.shape).ravel().tolist()


@spmd(mesh="dp=2,fsdp=2,tp=2")
@pytest.mark.parametrize(
    ("cases", "source"), [(CUT_ON_EACH_RANK, None), *at_night([(SCATTERED, 0)])], ids=["scattered", "cut"]
)
def test_distribute_tensor_gives_each_rank_what_the_layout_says(mesh, cases: list[Case], source: int | None):
    for shape, placements in cases:
        whole = torch.arange(math.prod(shape)).reshape(shape)
        sharded = dtensor.distribute_tensor(whole, mesh, [in_torch(p) for p in placements], src_data_rank=source)
        held = sharded.to_local().flatten().tolist()
        assert held == rows_of(Layout.from_placements(plain_mesh(mesh), shape, placements)), (shape, placements)


def fsdp2_over(mesh, size: int) -> tuple[list[int], Layout]:
    """What FSDP2 makes of a dim that the other axes have split: this rank's rows, and torch's own label."""
    inner = mesh[mesh.mesh_dim_names[1:]]
    module = nn.Module()
    rows = dtensor.distribute_tensor(torch.arange(float(size)), inner, [dtensor.Shard(0)] * inner.ndim)
    module.weight = nn.Parameter(rows)
    fully_shard(module, mesh=mesh[mesh.mesh_dim_names[0]])
    label = [placement_of(placement) for placement in module.weight.placements]
    held = [int(row) for row in module.weight.to_local().tolist()]
    return held, Layout.from_placements(plain_mesh(mesh), (size,), label)


@spmd(mesh="fsdp=2,tp=4")
@pytest.mark.parametrize("size", [12, *at_night([5, 13, 3])])
def test_fsdp2_over_tp_holds_what_its_label_says_even_and_uneven(mesh, size: int):
    held, label = fsdp2_over(mesh, size)
    assert write(label) == f"[{size}/tp/fsdp]"
    assert held == rows_of(label)


@nightly
@spmd(mesh="fsdp=2,cp=2,tp=2")
def test_fsdp2_over_two_uneven_axes_holds_another_cut_than_its_label_says(mesh):
    """FSDP2 chunks level by level, and labels it with one split factor, the product of both axes' sizes.

    torch reads a split factor of 4 as 4 chunks of the whole dim. Chunks of chunks are other chunks where a size does
    not divide: of 5 rows, torch 2.13.0 puts row 3 on the rank whose label says row 4.
    """
    as_labeled = {}
    for size in (8, 12, 7, 5):
        held, label = fsdp2_over(mesh, size)
        assert held == rows_of(parse(f"[{size}/cp/tp/fsdp]").layout(label.mesh))
        of_all = [None] * distributed.get_world_size()
        distributed.all_gather_object(of_all, held == rows_of(label))
        as_labeled[size] = all(of_all)
    assert as_labeled == {8: True, 12: True, 7: True, 5: False}
