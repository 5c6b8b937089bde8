"""Naive pipeline (model parallel): layers are split over ranks, and the whole batch passes through one rank at a time.

Each rank along pp has some consecutive layers, with their gradients and optimizer state. It receives activations, runs
its layers, and sends their output to the next rank; backward runs the other way with gradients. Each parameter is on
one rank: nothing is copied and nothing is summed. But only one rank works at any time, so with p ranks a fraction (p -
1) / p of the time is idle: the bubble. Micro-batches shrink it: `pp_gpipe` has the same model, stages and batch.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.probes._pipeline import send_to_all
from shardviz.probes.pp_gpipe import batch, build, check_mesh, parallelize, stages

AXES = ("pp",)
MESH = (4,)
STAGE_AXES = ("pp",)

__all__ = ["batch", "build", "check_mesh", "parallelize", "stages"]


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
    return send_to_all(loss.detach(), mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
