"""One line in a job of one's own: the model is captured when it is first called."""

import subprocess
import sys

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Shard

import shardviz
from shardviz.check.run import check_dump
from shardviz.live.compat import fully_shard
from shardviz.testing import spmd


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))


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


def test_a_callback_without_its_library_says_what_to_install():
    code = "import sys\nfor name in ('transformers', 'lightning', 'lightning.pytorch', 'pytorch_lightning'):\n"
    code += "    sys.modules[name] = None\nimport shardviz, shardviz.errors\n"
    for name in ("TrainerCallback", "LightningCallback"):
        code += f"try:\n    shardviz.{name}\nexcept shardviz.errors.ShardvizError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "shardviz.TrainerCallback needs transformers" in done.stdout
    assert "shardviz.LightningCallback needs lightning" in done.stdout
    assert done.stdout.count("Hint: pip install") == 2
