"""Loads a tiny MoE with its experts dealt out to the ranks by transformers' expert parallelism, and trains a step."""

import sys

import torch
from torch import distributed
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def main(words):
    distributed.init_process_group("gloo")
    if distributed.get_rank() == 0:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).to(torch.bfloat16).save_pretrained("tiny")
    distributed.barrier()
    sizes = {"tp_size": 2, "ep_size": 2} if "tp" in words else {"fsdp_size": 2, "ep_size": 2}
    model = Qwen3MoeForCausalLM.from_pretrained("tiny", distributed_config=DistributedConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    tokens = torch.arange(32).view(2, 16)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
