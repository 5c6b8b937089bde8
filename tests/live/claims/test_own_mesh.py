"""A claim and a fix name the axes of the tensor's own mesh, as DTensor.from_local takes it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardviz
from shardviz.check.run import check_dump
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.notation import write
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


@pytest.mark.skipif(not hasattr(DeviceMesh, "_unflatten"), reason="needs a torch whose meshes can be unflattened")
@spmd(mesh={"world": 2})
def test_a_mesh_that_a_job_unflattens_from_all_ranks_keeps_the_jobs_name(mesh, shard_dump):
    """torchtitan makes a mesh `world` and unflattens it to `fsdp`: findings were along an axis that no one knows."""
    model = nn.Linear(6, 24, bias=False)
    stamps = shardviz.stamp(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("world",))._unflatten(0, (2,), ("fsdp",)))
    shardviz.capture(model, shard_dump, stamps=stamps)
    (weight,) = dump_of(read_files(shard_dump)).at("stamped")
    assert write(weight.claimed) == "[24/fsdp, 6]"
    assert weight.claimed.mesh.axes == read_files(shard_dump).mesh.axes == ("fsdp",)


@spmd(mesh={"dp_shard": 2, "tp": 2})
def test_an_axis_that_is_flattened_to_another_name_has_one_name_in_all_weights(mesh, shard_dump):
    """accelerate flattens `dp_shard` to `dp_shard_cp`, and FSDP2 joins that with the axis of tensor parallelism."""
    flattened = mesh["dp_shard"]._flatten("dp_shard_cp")
    model = nn.Sequential(nn.Linear(6, 24, bias=False), nn.Linear(24, 8, bias=False))
    stamps = shardviz.stamp(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=flattened)
    shardviz.capture(model, shard_dump, stamps=stamps)
    claimed = {tensor.name: write(tensor.claimed) for tensor in dump_of(read_files(shard_dump)).at("stamped")}
    assert claimed == {"0.weight": "[24/tp/dp_shard, 6]", "1.weight": "[8/dp_shard, 24]"}
    assert check_dump(shard_dump).findings == ()
