"""Loads a tiny model under its own tensor-parallel plan and saves it again: `torchrun ... tp_plan.py hrm_text`."""

import sys

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": TEXT,
    "hrm_text": {**TEXT, "num_layers_per_stack": 4},
    "inkling2_text": {
        **TEXT, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 96,
    },
}  # fmt: skip


def build(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family]))
    with torch.no_grad():
        for weight in model.state_dict().values():
            if weight.is_floating_point():
                weight.normal_(std=0.1)
    return model


def main(family):
    distributed.init_process_group("gloo")
    tokens = torch.arange(1, 33).view(2, 16)
    if distributed.get_rank() == 0:
        model = build(family).eval()
        print("loss on one rank", model(tokens, labels=tokens, use_cache=False).loss.item())
        model.save_pretrained("before")
    distributed.barrier()
    plan = DistributedConfig(tp_size=distributed.get_world_size(), tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained("before", distributed_config=plan).eval()
    loss = model(tokens, labels=tokens, use_cache=False).loss.item()
    if distributed.get_rank() == 0:
        print("loss under its plan", loss)
    model.save_pretrained("after")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
