"""Trains a tiny Llama by transformers' Trainer, with DistributedDataParallel: the script knows nothing of shardviz."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip


def main():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    tokens = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    args = TrainingArguments("out", max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
    Trainer(model=model, args=args, train_dataset=tokens).train()


if __name__ == "__main__":
    main()
