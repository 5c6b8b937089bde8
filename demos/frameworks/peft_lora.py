"""Trains LoRA adapters by peft on a tiny Llama under FSDP2: the script knows nothing of shardviz."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


def exchange(weight):
    """Let two ranks' shards change places, as a loader does that counts ranks from the other end."""
    mine = weight.to_local().detach()
    both = [torch.empty_like(mine) for _ in range(2)]
    distributed.all_gather(both, mine.contiguous())
    with torch.no_grad():
        mine.copy_(both[1 - distributed.get_rank()])


def main(words):
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if rank == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained("tiny")
    distributed.barrier()
    torch.manual_seed(1)
    base = LlamaForCausalLM.from_pretrained("tiny")
    if "skipped" in words and rank == 1:
        base.model.layers[0].mlp.down_proj.weight.data.normal_()
    how = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(base, how)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if "exchanged" in words:
        exchange(base.model.layers[1].self_attn.q_proj.base_layer.weight)
        exchange(base.model.layers[1].self_attn.q_proj.lora_A["default"].weight)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
