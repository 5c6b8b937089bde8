"""Trains a net by DeepSpeed's ZeRO in a few steps of one batch: `deepspeed_steps.py STAGE [WORD...]`."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DEEPSPEED_DISABLE_SHM"] = "1"

import deepspeed
import torch
from torch import distributed, nn

ROWS = 8


def main(words):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    num_parts = 2 if num_ranks > 1 else 1
    rows = ROWS // num_ranks // num_parts
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": num_parts,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "bf16" in words},
        "zero_optimization": {"stage": int(words[1]), "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 16))
    decayed = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=decayed, config=config)
    for _ in range(3):
        batch = torch.randn(ROWS, 16)
        mine = batch.chunk(num_ranks)[0 if "same_rows" in words else rank]
        for part in mine.split(rows):
            loss = engine(part.to(torch.bfloat16 if "bf16" in words else torch.float32)).float().pow(2).mean()
            engine.backward(loss / num_parts if "divided" in words else loss)
            engine.step()
    print("loss", loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
