"""Trains a tiny Llama by accelerate under FSDP2, loaded by rank 0 alone: the script knows nothing of shardviz."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


def on_cpus(plugin):
    """Return an accelerator with FSDP2, which accelerate turns off where there is no GPU."""
    begin = AcceleratorState.__init__

    def with_plugin(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    AcceleratorState.__init__ = with_plugin
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def exchange(weight):
    """Let two ranks' shards change places, as a loader does that counts ranks from the other end."""
    mine = weight.to_local().detach()
    both = [torch.empty_like(mine) for _ in range(2)]
    distributed.all_gather(both, mine.contiguous())
    with torch.no_grad():
        mine.copy_(both[1 - distributed.get_rank()])


def main(words):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading="efficient" in words, reshard_after_forward=True,
    )  # fmt: skip
    accelerator = on_cpus(plugin)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if "exchanged" in words:
        exchange(model.model.layers[1].self_attn.q_proj.weight)
    if "skipped" in words and accelerator.process_index == 1:
        model.lm_head.weight.detach().to_local().normal_()
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        loss = model(tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print("loss", loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
