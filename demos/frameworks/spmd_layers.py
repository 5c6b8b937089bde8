"""Trains layers whose plain weights are annotated by `spmd_types`, cut out of a checkpoint by what they say."""

import sys

import spmd_types
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

LAYOUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
"""The dim that tensor parallelism splits of each weight; others are copies."""


class Block(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16, bias=False)
        self.mesh = mesh
        for name, dim in LAYOUTS.items():
            module, _, attribute = name.partition(".")
            whole = self.get_parameter(name)
            part = nn.Parameter(torch.empty_like(whole.chunk(mesh.size(), dim)[0]))
            setattr(self.get_submodule(module), attribute, part)
            with spmd_types.set_current_mesh(mesh):
                spmd_types.assert_type(part, {"tp": spmd_types.S(dim)})

    def forward(self, x):
        part = nn.functional.linear(torch.tanh(self.up(x)), self.down.weight)
        return torch.distributed.nn.functional.all_reduce(part, group=self.mesh.get_group("tp"))


def load(block, words):
    """Cut each weight out of a checkpoint as its annotation says; or as a loader that is wrong."""
    rank = distributed.get_rank()
    if rank == 0:
        torch.manual_seed(1)
        shapes = {"up.weight": (48, 16), "up.bias": (48,), "down.weight": (16, 48)}
        save_file({name: torch.randn(shape) for name, shape in shapes.items()}, "whole.safetensors")
    distributed.barrier()
    part = 1 - rank if "exchanged" in words else rank
    with torch.no_grad():
        for name, whole in load_file("whole.safetensors").items():
            block.get_parameter(name).copy_(whole.chunk(2, LAYOUTS[name])[part])
        if rank == 1 and "skipped" in words:
            block.up.weight.normal_()
    return block


def main(words):
    distributed.init_process_group("gloo")
    block = load(Block(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))), words)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    for _ in range(2):
        loss = block(torch.ones(4, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
