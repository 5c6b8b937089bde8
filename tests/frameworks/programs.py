"""Right programs that shardviz was not written for: `programs.py NAME` runs one on the ranks that torchrun started."""

import sys

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
TP = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(), "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(), "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(), "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}  # fmt: skip


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | options))


def mesh():
    return init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))


def shard(model, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def train(model):
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed_and_tied():
    model = llama(tie_word_embeddings=True)
    model.gradient_checkpointing_enable()
    train(shard(model))


def mixed_precision():
    train(shard(llama(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)))


def frozen_layers():
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    train(shard(model))


def offloaded():
    train(shard(llama(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def split_by_columns():
    train(shard(llama(), shard_placement_fn=lambda weight: Shard(weight.ndim - 1)))


def sent_by_rank_0():
    """A model on the meta device, whose values rank 0 alone has; every rank computes its rotary buffers again."""
    whole = llama().state_dict() if distributed.get_rank() == 0 else {}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    shard(model).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    train(model)


def rotary_scaled_afterwards():
    """Long context: the rotary frequencies are halved on every rank when the model is sharded already."""
    model = shard(llama())
    model.model.rotary_emb.inv_freq.mul_(0.1)
    train(model)


def compiled():
    model = llama()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    train(shard(model))


def lora_on_tensor_parallel():
    from peft import LoraConfig, get_peft_model

    model = parallelize_module(llama(), mesh(), TP)
    train(get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"])))


def quantized_base():
    """Frozen int8 weights that FSDP2 is to leave alone."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear) and "mlp" in name)
    frozen = {weight.requires_grad_(False) for name, weight in model.named_parameters() if "mlp" in name}
    fully_shard(model, mesh=mesh(), ignored_params=frozen)
    train(model)


def teacher_and_student():
    teacher, student = llama().requires_grad_(False), shard(llama(hidden_size=64))
    with torch.no_grad():
        teacher(input_ids=torch.arange(32).view(2, 16))
    train(student)


def sent_to_all_before():
    """Seeds differ by rank; rank 0's weights are sent to all before they are sharded."""
    torch.manual_seed(distributed.get_rank())
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for tensor in (*model.parameters(), *model.buffers()):
        distributed.broadcast(tensor.data, 0)
    train(shard(model))


PROGRAMS = (
    checkpointed_and_tied, mixed_precision, frozen_layers, offloaded, split_by_columns, sent_by_rank_0,
    rotary_scaled_afterwards, compiled, lora_on_tensor_parallel, quantized_base, teacher_and_student,
    sent_to_all_before,
)  # fmt: skip

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    next(one for one in PROGRAMS if one.__name__ == sys.argv[1])()
    distributed.barrier()
    distributed.destroy_process_group()
