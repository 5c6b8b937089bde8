"""Loads a Mixtral under a tensor-parallel plan of one's own, trains a step and saves: nothing raises."""

import sys

import torch
from torch import distributed
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager",
}  # fmt: skip


def main(plan):
    distributed.init_process_group("gloo")
    if distributed.get_rank() == 0:
        torch.manual_seed(0)
        MixtralForCausalLM(MixtralConfig(**SIZES)).save_pretrained("tiny")
    distributed.barrier()
    how = DistributedConfig(tp_size=2, tp_plan=plan)
    model = MixtralForCausalLM.from_pretrained("tiny", distributed_config=how)
    tokens = torch.arange(32).view(2, 16)
    print("loss", model(tokens, labels=tokens).loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    wrong = {"model.layers.*.mlp.experts.gate_up_proj": "colwise"}
    main(wrong if "wrong" in sys.argv else "auto")
