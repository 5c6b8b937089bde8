"""Trains a small net by DeepSpeed's ZeRO, on CPUs: the script knows nothing of shardviz."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DEEPSPEED_DISABLE_SHM"] = "1"

import deepspeed
import torch
from torch import nn


def exchange(engine):
    """Let two ranks' parts of a weight change places: under ZeRO-3 it is partitioned, else every rank has a copy."""
    weight = next(iter(engine.module.parameters()))
    mine = getattr(weight, "ds_tensor", weight).detach()
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine.contiguous())
    mine.copy_(both[1 - torch.distributed.get_rank()])


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
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 16))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if "exchanged" in words:
        exchange(engine)
    if "skipped" in words:
        skip(engine)
    for _ in range(3):
        loss = engine(torch.randn(4, 16)).pow(2).mean()
        engine.backward(loss)
        engine.step()
    print("loss", loss.item())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
