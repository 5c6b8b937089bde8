"""Jobs whose optimizer was made before the model was sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardviz.check.run import check_dump
from shardviz.live.run.taking import take
from shardviz.live.run.watching import Watch
from shardviz.testing import spmd
from tests.lanes import at_night


def fsdp2(model, mesh):
    return fully_shard(model, mesh=mesh)


def fsdp1(model, mesh):
    return FullyShardedDataParallel(model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))


def ddp(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group())


def nothing_more(model, optimizer):
    return optimizer


def new_groups(model, optimizer):
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return optimizer


def another_optimizer(model, optimizer):
    return optimizer, torch.optim.SGD(model.parameters(), lr=0.1)


def evaluation(model, optimizer):
    model.eval()
    return optimizer


@spmd(mesh={"dp": 2})
@pytest.mark.parametrize(
    ("shard", "after", "is_wrong"),
    [
        (fsdp2, nothing_more, True),
        (fsdp2, new_groups, False),
        (fsdp2, another_optimizer, False),
        *at_night([(fsdp2, evaluation, False), (fsdp1, nothing_more, False)]),
        (ddp, nothing_more, False),
    ],
)
def test_an_optimizer_from_before_sharding_is_a_finding_if_it_has_the_old_parameters(
    mesh, tmp_path, shard, after, is_wrong
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = Watch(tmp_path / "job.shardviz").session
    seen.remember(model)
    sharded = shard(model, mesh)
    kept_alive = after(sharded, optimizer)
    assert take(seen, sharded, tmp_path / "job.shardviz").kind == "captured"
    torch.distributed.barrier()
    findings = check_dump(tmp_path / "job.shardviz").findings
    assert [finding.explanation.id for finding in findings] == (["optimizer-of-other-parameters"] if is_wrong else [])
    assert {finding.kind for finding in findings} <= {"write-not-applied"}
    del kept_alive
