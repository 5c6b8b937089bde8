"""Trains a tiny Llama by torchtitan's own trainer, on CPUs: the script knows nothing of shardviz.

`--module torchtitan_llama --config saving` on one rank makes a tokenizer, texts and a whole checkpoint; the other
configurations load that checkpoint: `loading`, and the wrong ones `exchanged` and `skipped`.
"""

import collections
import json
import os
import types
from pathlib import Path

import torch
from torch import distributed, nn


def imitate_a_gpu():
    """Give torch.cpu what torchtitan asks of a GPU, and gloo a reduction that it has: sums."""
    import torch._utils
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34, name="cpu")
    torch.cpu.memory_stats = lambda *_: collections.defaultdict(int)
    for name in ("reset_peak_memory_stats", "empty_cache", "set_device", "reset_accumulated_memory_stats"):
        setattr(torch.cpu, name, lambda *_, **__: None)
    divide = FSDPModule.set_gradient_divide_factor

    def with_sums(self, factor):
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = with_sums
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention

    utils.set_pg_timeouts = lambda *_, **__: None
    FlexAttention.forward = causal
    FlexAttention.__init__ = lambda self, config=None: super(FlexAttention, self).__init__()


def causal(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, enable_gqa=False, **_):  # noqa: N803
    q, k, v = (one.transpose(1, 2) for one in (q_BLNH, k_BLNH, v_BLNH))
    found = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True, enable_gqa=enable_gqa)
    return found.transpose(1, 2)


def llama():
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return llama3_debugmodel()


def tiny(config):
    """Cut a configuration of torchtitan's down to two steps on CPUs."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    config.hf_assets_path, config.dataloader.dataset_path = "./assets", "./assets/c4_test"
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 64, 2, 2
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.activation_checkpoint = FullAC.Config()
    config.checkpoint.enable, config.checkpoint.last_save_model_only = True, True
    config.checkpoint.interval = 100
    return config


def saving(model=llama):
    make_assets()
    config = tiny(model())
    config.checkpoint.folder = "whole"
    return config


def loading(model=llama):
    config = tiny(model())
    config.checkpoint.folder = "mine"
    config.checkpoint.initial_load_path = os.path.abspath("outputs/whole/step-2")
    return config


def exchanged():
    """Two ranks' shards change places after the load, as in a loader that counts ranks from the other end."""
    after_load(exchange)
    return loading()


def skipped():
    """Rank 1 has what was in memory before the load."""
    after_load(lambda mine: mine.normal_() if distributed.get_rank() == 1 else None)
    return loading()


def exchange(mine):
    both = [torch.empty_like(mine) for _ in range(2)]
    distributed.all_gather(both, mine.contiguous())
    mine.copy_(both[1 - distributed.get_rank()])


def after_load(harm):
    from torchtitan.components.checkpoint import CheckpointManager

    load = CheckpointManager.load

    def and_harm(self, *args, **kwargs):
        done = load(self, *args, **kwargs)
        (model,) = self.states["model"].model
        harm(model.layers["0"].attention.wo.weight.detach().to_local())
        return done

    CheckpointManager.load = and_harm


def make_assets():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = Path("assets/c4_test")
    texts.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    signs = ["<unk>", "<bos>", "<eos>"]
    how = trainers.BpeTrainer(
        vocab_size=300, special_tokens=signs, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["hello world shards"] * 5, how)
    tokenizer.save("assets/tokenizer.json")
    Path("assets/tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    lines = [json.dumps({"text": f"hello world of shards number {i} " * 20}) for i in range(200)]
    (texts / "data.json").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    imitate_a_gpu()
    from torchtitan.train import main

    main()
