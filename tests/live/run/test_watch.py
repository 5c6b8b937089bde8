"""One line in a job of one's own: the model is captured when it is first called."""

import sys

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardviz
from shardviz.check.run import check_dump
from shardviz.errors import ShardvizError
from shardviz.testing import spmd
from tests.lanes import nightly


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))


@nightly
@spmd(mesh={"fsdp": 2})
def test_a_model_that_is_watched_before_it_is_sharded_is_compared_with_what_it_held(mesh, shard_dump):
    model = built()
    shardviz.watch(model, shard_dump)
    fully_shard(model, mesh=mesh)
    call = nn.Module.__call__
    model(torch.randn(2, 16))
    assert nn.Module.__call__ is not call
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())
    distributed.barrier()
    assert not list(shard_dump.parent.glob("*.run"))


@spmd(mesh={"tp": 2})
def test_a_shard_exchanged_before_the_first_call_is_named(mesh, shard_dump):
    model = built()
    shardviz.watch(model, shard_dump)
    weight = model[0].weight.detach()
    mine = weight.chunk(2)[1 - mesh.get_rank()].contiguous()
    model[0].weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
    model[0].bias = nn.Parameter(DTensor.from_local(model[0].bias.detach().chunk(2)[mesh.get_rank()], mesh, [Shard(0)]))
    model[0].requires_grad_(False)
    model[1](torch.randn(2, 24))
    (finding,) = check_dump(shard_dump).findings
    assert (finding.kind, finding.tensor) == ("misordered", "0.weight")


@nightly
@spmd(mesh={"fsdp": 2})
def test_weights_drawn_again_after_sharding_are_not_checked_where_a_rank_has_none_of_them(mesh, shard_dump):
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 1))
    shardviz.watch(model, shard_dump)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(mesh.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().uniform_(3, 4)
    model(torch.randn(2, 16))
    report = check_dump(shard_dump)
    assert not report.findings
    assert {one.tensor for one in report.not_checked} == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize(
    ("callback", "library", "modules"),
    [
        ("TrainerCallback", "transformers", ["transformers"]),
        ("LightningCallback", "lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"]),
    ],
)
def test_a_callback_without_its_library_says_what_to_install(callback, library, modules, monkeypatch):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed: importing it raises
    with pytest.raises(ShardvizError) as caught:
        getattr(shardviz, callback)
    assert caught.value.message.startswith(f"shardviz.{callback} needs {library}")
    assert caught.value.hint.startswith(f"pip install {library}")
