"""Trains a tiny DeepSeek-V3 by torchtitan's own trainer, experts split over ranks: nothing of shardviz in it.

`--module torchtitan_moe --config saving` on one rank makes a checkpoint, `--config loading` loads it.
"""

import os

import torch._dynamo
from torchtitan_llama import imitate_a_gpu, make_assets


def tiny():
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    config = deepseek_v3_debugmodel()
    config.hf_assets_path, config.dataloader.dataset_path = "./assets", "./assets/c4_test"
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 64, 2, 2
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.activation_checkpoint = FullAC.Config()
    config.checkpoint.enable, config.checkpoint.last_save_model_only = True, True
    config.checkpoint.interval = 100
    return config


def saving():
    make_assets()
    config = tiny()
    config.checkpoint.folder = "whole"
    return config


def loading():
    config = tiny()
    config.checkpoint.folder = "mine"
    config.checkpoint.initial_load_path = os.path.abspath("outputs/whole/step-2")
    return config


if __name__ == "__main__":
    imitate_a_gpu()
    torch._dynamo.config.disable = True  # torchtitan compiles kernels for GPUs
    from torchtitan.train import main

    main()
