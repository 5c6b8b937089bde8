"""Trains a small net by DeepSpeed's ZeRO, on CPUs: the script knows nothing of shardviz."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DEEPSPEED_DISABLE_SHM"] = "1"

import deepspeed
import torch
from torch import nn


def exchange(engine):
    """Let two ranks' parts change places: of a weight under ZeRO-3, else of the flat buffer of master copies."""
    weight = next(iter(engine.module.parameters()))
    mine = weight.ds_tensor.detach() if hasattr(weight, "ds_tensor") else masters(engine)
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine.contiguous())
    mine.copy_(both[1 - torch.distributed.get_rank()])


def masters(engine):
    """Return the flat buffer that has this rank's master copies in float32."""
    optimizer = engine.optimizer
    three = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return (three or optimizer.single_partition_of_fp32_groups)[0].detach()


def shift(engine):
    """Load one rank's master copies from the wrong offset: each is one element late."""
    if torch.distributed.get_rank() == 1:
        masters(engine).copy_(masters(engine).roll(-1))


def cut_columns(engine, model):
    """Give each rank half of a weight's columns, where ZeRO-3 has it in halves of the flattened weight."""
    weight, rank = next(iter(engine.module.parameters())), torch.distributed.get_rank()
    weight.ds_tensor.detach().copy_(model.T.chunk(2)[rank].flatten())


def skip(engine):
    """Lose one rank's load: what it has of the last weight is what was in memory before."""
    weight = list(engine.module.parameters())[-2]
    if torch.distributed.get_rank() == 1:
        getattr(weight, "ds_tensor", weight).detach().normal_()


def main(words):
    stage = int(words[1])
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "round_robin_gradients": "wrong" in words,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 16))
    whole = model[0].weight.detach().clone()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if "exchanged" in words:
        exchange(engine)
    if "skipped" in words:
        skip(engine)
    if "shifted" in words:
        shift(engine)
    if "wrong" in words and stage == 3:
        cut_columns(engine, whole)
    for _ in range(3):
        loss = engine(torch.randn(4, 16)).pow(2).mean()
        engine.backward(loss)
        engine.step()
    print("loss", loss.item())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
