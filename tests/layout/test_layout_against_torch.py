"""The oracle agrees with torch's own sharding, element by element, on thousands of generated cases.

No disagreement was found with torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import example, given
from torch.distributed.tensor import placement_types
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.layout.notation import parse, write
from shardviz.layout.placements import Placement, Replicate, Shard, StridedShard
from tests.lanes import cases, nightly
from tests.layout.layouts import placed
from tests.layout.spelling import in_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.layout.mesh import Coord

Placed = tuple[Mesh, tuple[int, ...], tuple[Placement, ...]]


def torch_shards(
    whole: torch.Tensor, mesh: Mesh, placements: Sequence[placement_types.Placement]
) -> dict[Coord, torch.Tensor]:
    """What every coordinate holds when torch's own placements cut the tensor, from the first axis to the last."""
    shards: dict[Coord, torch.Tensor] = {(): whole}
    for size, placement in zip(mesh.shape, placements, strict=True):
        cut = {}
        for coord, shard in shards.items():
            parts = [shard] * size
            if isinstance(placement, placement_types.Shard | placement_types._StridedShard):
                parts, _ = placement._split_tensor(shard, size, with_padding=False, contiguous=False)
            cut |= {(*coord, index): part for index, part in enumerate(parts)}
        shards = cut
    return shards


@cases(1500)
@given(placed())
@example((parse_mesh("fsdp=2,tp=4"), (12, 12), (StridedShard(0, 4), Shard(0))))
@example((parse_mesh("fsdp=2,tp=2"), (6,), (StridedShard(0, 2), Shard(0))))  # pytorch PR 150490
def test_every_coordinate_holds_the_elements_that_torch_gives_it(case: Placed):
    mesh, shape, placements = case
    layout = Layout.from_placements(mesh, shape, placements)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for coord, shard in torch_shards(whole, mesh, [in_torch(p) for p in placements]).items():
        assert np.array_equal(layout.region(coord).flat_ids(shape), shard.numpy()), (str(layout), coord)


@cases(500)
@given(placed())
def test_local_shapes_and_offsets_are_those_that_torch_saves_checkpoints_by(case: Placed):
    mesh, shape, placements = case
    layout = Layout.from_placements(mesh, shape, placements)
    spelled = [in_torch(placement) for placement in placements]
    for coord in mesh.coords():
        region = layout.region(coord)
        first = tuple(ranges[0][0] if ranges else size for ranges, size in zip(region.dims, shape, strict=True))
        assert _compute_local_shape_and_global_offset(shape, mesh.shape, coord, spelled) == (region.shape, first)


@nightly
def test_every_pair_of_splits_of_a_short_dim_is_that_of_torch():
    mesh = parse_mesh("fsdp=2,tp=3")
    kinds = [Replicate(), Shard(0), *(StridedShard(0, factor) for factor in range(1, 6))]
    for size, *placements in product(range(15), kinds, kinds):
        layout = Layout.from_placements(mesh, (size,), placements)
        shards = torch_shards(torch.arange(size), mesh, [in_torch(p) for p in placements])
        for coord, shard in shards.items():
            assert layout.region(coord).flat_ids((size,)).tolist() == shard.tolist(), (size, placements, coord)


def chunks(ids: torch.Tensor, sizes: Sequence[int], coord: Sequence[int]) -> list[int]:
    """Split level by level with `torch.chunk`, outermost first; past the last chunk a shard is empty."""
    for size, position in zip(sizes, coord, strict=True):
        parts = torch.chunk(ids, size)
        ids = parts[position] if position < len(parts) else ids[:0]
    return ids.tolist()


@pytest.mark.parametrize("size", [0, 1, 5, 7, 12, 13, 24])
@pytest.mark.parametrize("chain", [("tp", "fsdp"), ("fsdp", "tp"), ("tp", "cp", "fsdp"), ("cp", "fsdp", "tp")])
def test_the_notation_is_chunked_level_by_level(size: int, chain: tuple[str, ...]):
    mesh = parse_mesh("fsdp=2,cp=3,tp=2")
    layout = parse(f"[{size}/{'/'.join(chain)}]").layout(mesh)
    for coord in mesh.coords():
        at = [coord[mesh.axis_index(axis)] for axis in chain]
        wanted = chunks(torch.arange(size), [mesh.axis_size(axis) for axis in chain], at)
        assert layout.region(coord).flat_ids((size,)).tolist() == wanted


def test_fsdp2_over_tp_reads_as_the_chain_that_fsdp2_makes():
    mesh = parse_mesh("fsdp=2,tp=4")
    for size in range(40):
        layout = Layout.from_placements(mesh, (size,), (StridedShard(0, 4), Shard(0)))
        assert write(layout) == f"[{size}/tp/fsdp]"


def test_three_uneven_levels_are_read_as_torch_cuts_them_and_not_as_fsdp2_makes_them():
    """What FSDP2 makes over two other axes, and the label it gives it (test_layout_on_ranks.py shows both, live)."""
    mesh = parse_mesh("fsdp=2,cp=2,tp=2")
    label = (StridedShard(0, 4), Shard(0), Shard(0))
    made = parse("[5/cp/tp/fsdp]").layout(mesh)
    claimed = Layout.from_placements(mesh, (5,), label)
    shards = torch_shards(torch.arange(5), mesh, [in_torch(placement) for placement in label])
    assert {coord: claimed.region(coord).flat_ids((5,)).tolist() for coord in mesh.coords()} == {
        coord: shard.tolist() for coord, shard in shards.items()
    }
    assert write(claimed) == "[((5/4/fsdp)/cp)/tp]"
    assert not claimed.same_regions(made)
    assert made.placements() is None, "torch has no label for it"
    assert write(Layout.from_placements(mesh, (8,), label)) == "[8/cp/tp/fsdp]"
