"""Trains a block of Megatron-core's tensor-parallel layers, on CPUs: the script knows nothing of shardviz."""

import sys

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file, save_file
from torch import distributed, nn


class Block(nn.Module):
    def __init__(self, stride):
        super().__init__()
        config = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True,
            tensor_model_parallel_size=2,
        )  # fmt: skip
        options = {"config": config, "init_method": nn.init.normal_}
        # Gate and up in one weight, each split by itself: that is what a stride of 2 says.
        self.gated = tensor_parallel.ColumnParallelLinear(16, 32, gather_output=False, stride=stride, **options)
        self.up = tensor_parallel.ColumnParallelLinear(16, 48, gather_output=False, **options)
        self.norm = nn.LayerNorm(24)
        self.down = tensor_parallel.RowParallelLinear(
            48, 16, input_is_parallel=True, bias=True, skip_bias_add=False, **options
        )

    def forward(self, x):
        gate, value = self.gated(x)[0].chunk(2, -1)
        mixed = (torch.sigmoid(gate) * value).mean(-1, keepdim=True)
        return self.down(torch.tanh(self.norm(self.up(x)[0] + mixed)))[0]


def load(block, words):
    """Cut each weight out of a checkpoint as `partition_dim` says; or as a loader that is wrong."""
    rank = distributed.get_rank()
    if rank == 0:
        torch.manual_seed(1)
        shapes = {
            "gated.weight": (32, 16),
            "gated.bias": (32,),
            "up.weight": (48, 16),
            "up.bias": (48,),
            "down.weight": (16, 48),
            "down.bias": (16,),
        }
        save_file({name: torch.randn(shape) for name, shape in shapes.items()}, "whole.safetensors")
    distributed.barrier()
    part = 1 - rank if "exchanged" in words else rank
    with torch.no_grad():
        for name, whole in load_file("whole.safetensors").items():
            weight = block.get_parameter(name)
            if rank == 1 and "skipped" in words and name == "up.weight":
                continue
            if getattr(weight, "tensor_model_parallel", False):
                dim = weight.partition_dim
                pieces = whole.chunk(1 if "unstrided" in words or not name.startswith("gated") else 2, dim)
                whole = torch.cat([piece.chunk(2, dim)[part] for piece in pieces], dim)
            weight.copy_(whole)


def main(words):
    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    block = Block(1 if "wrong" in words else 2)
    load(block, words)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    for _ in range(2):
        loss = block(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
