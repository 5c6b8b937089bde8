"""Trains a tiny DeepSeek-V3 by torchtitan's own trainer, experts split over ranks: nothing of shardviz in it.

`--module torchtitan_moe --config saving` on one rank makes a checkpoint, `--config loading` loads it.
"""

import torch._dynamo
import torchtitan_llama


def deepseek():
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    return deepseek_v3_debugmodel()


def saving():
    return torchtitan_llama.saving(deepseek)


def loading():
    return torchtitan_llama.loading(deepseek)


if __name__ == "__main__":
    torchtitan_llama.imitate_a_gpu()
    torch._dynamo.config.disable = True  # torchtitan compiles kernels for GPUs
    from torchtitan.train import main

    main()
