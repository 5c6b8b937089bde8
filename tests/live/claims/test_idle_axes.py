"""An axis that splits no tensor is said; copies that somebody asked for are not."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd
from tests.lanes import at_night, nightly


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8))


def said(folder):
    report = check_dump(folder)
    assert report.findings == ()
    return [one.why for one in report.not_checked if "labeled as split" in one.why]


@pytest.mark.parametrize("applied", [False, *at_night([True])])
@spmd(mesh={"dp_shard": 2, "tp": 2})
def test_fully_shard_that_was_never_called_is_reported(mesh, shard_dump, applied):
    model = parallelize_module(built(), mesh["tp"], {"0": ColwiseParallel()})
    if applied:
        fully_shard(model, mesh=mesh["dp_shard"])
    shardviz.capture(model, shard_dump, mesh=mesh)
    why = "what shards over dp_shard=2: no tensor of the model is labeled as split along this axis"
    assert said(shard_dump) == ([] if applied else [why])


@nightly
@spmd(mesh={"outer": 2, "inner": 2})
def test_the_axes_of_hsdp_and_of_ddp_are_ordinary_whatever_their_names(mesh, shard_dump):
    model = built()
    fully_shard(model, mesh=mesh)
    shardviz.capture(model, shard_dump, mesh=mesh)
    assert said(shard_dump) == []
    model = DistributedDataParallel(built(), process_group=mesh.get_group("outer"))
    shardviz.capture(model, shard_dump, mesh=mesh["outer"], force=True)
    assert said(shard_dump) == []


@spmd(mesh={"dp": 2, "tp": 2})
def test_a_data_parallel_axis_without_a_wrapper_is_ordinary(mesh, shard_dump):
    model = parallelize_module(built(), mesh["tp"], {"0": ColwiseParallel()})
    shardviz.capture(model, shard_dump, mesh=mesh)
    assert said(shard_dump) == []
