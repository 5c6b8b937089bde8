"""Naive pipeline, or model parallel: layers are dealt out to ranks, and the whole batch goes through one after another.

Each rank along pp has some consecutive layers, with their gradients and optimizer state. It receives activations, runs
its layers, and sends what comes out to the next; backward runs the other way with gradients. Nothing is copied, nothing
summed: each parameter is on one rank. But only one rank works at any time, so of p ranks the fraction (p - 1) / p is
idle: the bubble. Micro-batches shrink it, see `pp_gpipe`.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._models import Blocks
from shardviz.probes._pipeline import LAYERS, keep, layers_of, refuse_idle_stages, tell_all

AXES = ("pp",)
MESH = (4,)
STAGE_AXES = ("pp",)


def check_mesh(mesh: Mesh) -> None:
    refuse_idle_stages(mesh)


def build() -> nn.Module:
    return Blocks(LAYERS)


def parallelize(model: Blocks, mesh: DeviceMesh) -> None:
    keep(model, layers_of(mesh.get_local_rank("pp"), mesh["pp"].size()))


def stages(model: Blocks, mesh: DeviceMesh) -> dict[int, nn.Module]:
    return {mesh.get_local_rank("pp"): model}


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


def step(model: nn.Module, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    stage, last = mesh.get_local_rank("pp"), mesh["pp"].size() - 1
    ranks = distributed.get_process_group_ranks(mesh.get_group("pp"))
    x = rows
    if stage > 0:
        x = torch.empty_like(rows)
        distributed.recv(x, src=ranks[stage - 1])
        x.requires_grad_()
    output = model(x)
    loss = output.square().mean()
    if stage == last:
        loss.backward()
    else:
        distributed.send(output.detach(), dst=ranks[stage + 1])
        gradient = torch.empty_like(output)
        distributed.recv(gradient, src=ranks[stage + 1])
        output.backward(gradient)
    if stage > 0:
        distributed.send(x.grad, dst=ranks[stage - 1])
    return tell_all(loss.detach(), mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
