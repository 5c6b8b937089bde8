"""DeepSpeed's engines: ZeRO-3's flattened partitions have their claim, ZeRO-1 and 2 leave whole weights."""

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn

import shardviz
from shardviz.check.run import check_dump
from shardviz.testing import spmd
from tests.lanes import nightly

pytestmark = nightly
OPTIMIZER = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def engine_of(stage, folder):
    """Return DeepSpeed's engine around a model, and the checkpoint that it has the weights of."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", str(distributed.get_rank()))
    deepspeed = pytest.importorskip("deepspeed", reason="needs deepspeed: pip install -e '.[frameworks]'")
    deepspeed.init_distributed("gloo")
    model, path = built(), folder.with_name("checkpoint.safetensors")
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    distributed.barrier()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": OPTIMIZER}
    return deepspeed.initialize(model=model, config=config | {"zero_allow_untested_optimizer": True})[0], path


@pytest.mark.parametrize("stage", [1, 2, 3])
@spmd(mesh={"dp": 2})
def test_weights_of_every_stage_are_in_order_and_have_their_own_names(mesh, shard_dump, stage):
    engine, reference = engine_of(stage, shard_dump)
    shardviz.capture(engine, shard_dump, reference=reference)
    report = check_dump(shard_dump)
    assert (report.findings, report.not_checked) == ((), ())


@spmd(mesh={"dp": 2})
def test_padding_behind_a_partition_is_not_looked_at(mesh, shard_dump):
    engine, reference = engine_of(3, shard_dump)
    for param in engine.module.parameters():
        last = param.ds_tensor.numel() * 2 - param.ds_numel
        if last and distributed.get_rank() == 1:
            param.ds_tensor.data[-last:] = 7.0
    shardviz.capture(engine, shard_dump, reference=reference)
    assert check_dump(shard_dump).findings == ()


@spmd(mesh={"dp": 2})
def test_a_partition_that_holds_the_other_ranks_part_is_named(mesh, shard_dump):
    engine, reference = engine_of(3, shard_dump)
    whole = built()[0].weight.detach().flatten()
    held = next(engine.module.parameters()).ds_tensor
    if distributed.get_rank() == 0:
        held.data[:17] = whole[18:]
    shardviz.capture(engine, shard_dump, reference=reference)
    found = check_dump(shard_dump).findings
    assert {name for one in found for name in one.tensors} == {"0.weight"}
    assert {one.kind for one in found} <= {"duplicated", "missing", "misordered"}
