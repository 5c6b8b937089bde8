"""Trains a `PipelineModule` of DeepSpeed's in a few steps: `deepspeed_stages.py STAGES [clipped]`."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DEEPSPEED_DISABLE_SHM"] = "1"

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import distributed, nn

ROWS, PARTS = 8, 2


def main(words):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    stages = int(words[1])
    layers = [LayerSpec(nn.Linear, 16, 16) for _ in range(4)]
    model = PipelineModule(
        layers, stages, loss_fn=nn.functional.mse_loss, seed_layers=True, base_seed=7, partition_method="uniform"
    )
    replicas = distributed.get_world_size() // stages
    config = {
        "train_micro_batch_size_per_gpu": ROWS // PARTS // replicas,
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": 0.01 if "clipped" in words else 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    replica, drawn = engine.grid.get_data_parallel_rank(), torch.Generator().manual_seed(1)
    for _ in range(2):
        batch = torch.randn(PARTS, replicas, ROWS // PARTS // replicas, 16, generator=drawn)[:, replica]
        engine.train_batch(data_iter=iter([(part, part.flip(1)) for part in batch]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
