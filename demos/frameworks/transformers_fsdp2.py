"""Loads a tiny Llama shard by shard under FSDP2 by transformers' own `DistributedConfig`, and trains two steps."""

import os
import sys

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


def main(words):
    distributed.init_process_group("gloo")
    if distributed.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained("tiny")
    distributed.barrier()
    tp = 2 if "tp" in words else 1
    how = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]) // tp, tp_size=tp)
    model = LlamaForCausalLM.from_pretrained("tiny", distributed_config=how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
