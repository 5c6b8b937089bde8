"""The label that a fix gives is for the tensor's own mesh, as DTensor.from_local takes it."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd
from tests.lanes import at_night


def cut_by_segments(mesh, on, placements):
    """Return a stamped layer whose three segments are each split over tp, labeled as one dim."""
    model = nn.Linear(6, 24, bias=False)
    stamps = shardviz.stamp(model)
    at = mesh.get_local_rank("tp")
    mine = torch.cat([segment.chunk(2)[at] for segment in model.weight.detach().chunk(3)])
    model.weight = nn.Parameter(DTensor.from_local(mine, on, placements, run_check=False))
    return model, stamps


@pytest.mark.parametrize("whole", [False, *at_night([True])])
@spmd(mesh={"dp": 2, "tp": 2})
def test_a_tensor_on_a_part_of_the_mesh_gets_placements_for_that_part(mesh, shard_dump, whole):
    on, placements = (mesh, [Replicate(), Shard(0)]) if whole else (mesh["tp"], [Shard(0)])
    model, stamps = cut_by_segments(mesh, on, placements)
    shardviz.capture(model, shard_dump, mesh=mesh, stamps=stamps)
    (finding,) = [one for one in check_dump(shard_dump).findings if one.kind == "misordered"]
    assert (finding.claimed, finding.held) == ("[24/tp, 6]", "[24/3/tp, 6]")
    label = "(Replicate(), _StridedShard(0, split_factor=3))" if whole else "(_StridedShard(0, split_factor=3),)"
    assert f"label the local tensors by {label}," in finding.fix
