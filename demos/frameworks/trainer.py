"""Trains a tiny Llama by transformers' Trainer, with DistributedDataParallel or FSDP2: it knows nothing of shardviz."""

import sys

import torch
from accelerate.state import AcceleratorState, DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
FSDP2 = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": False}


def keep_fsdp_on_cpus():
    """Put back the FSDP2 that accelerate turns off where there is no GPU."""
    begin = AcceleratorState.__init__

    def with_plugin(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, kwargs["fsdp_plugin"]

    AcceleratorState.__init__ = with_plugin


def main(words):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    tokens = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    options = {"fsdp": True, "fsdp_config": FSDP2} if "fsdp2" in words else {}
    if options:
        keep_fsdp_on_cpus()
    args = TrainingArguments(
        "out", max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **options
    )
    Trainer(model=model, args=args, train_dataset=tokens).train()


if __name__ == "__main__":
    main(sys.argv)
