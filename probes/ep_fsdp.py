"""Expert parallel with FSDP2: two meshes in one model, the same ranks divided in two ways.

Experts are split over ep, and each rank's experts are split again over fsdp: `[8/ep/fsdp, 12, 12]`. The rest of the
model (here the router) is not aware of experts: it is split over all ranks, with fsdp and ep flattened into one axis,
`[8/fsdp_ep, 12]`. So experts are gathered over fsdp only, the router is gathered over all ranks, and tokens travel over
ep. Gradients are averaged and split again over the ranks that took part in the gather. The batch is split over both
axes.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.live.compat.meshes import flatten_mesh  # mesh._flatten(): torch has no public name for it
from shardviz.probes._experts import FEATURES, MixtureOfExperts
from shardviz.probes._refusals import refuse_empty

AXES = ("fsdp", "ep")
MESH = (2, 2)
BATCH_AXES = ("fsdp", "ep")

EXPERTS = 8

expect = {"experts.weight": "[*/ep/fsdp, *, *]"}


def check_mesh(mesh: Mesh) -> None:
    refuse_empty(mesh, "ep", EXPERTS, "experts", "a rank without experts would only pass tokens on")


def build() -> nn.Module:
    return MixtureOfExperts(EXPERTS)


def parallelize(model: MixtureOfExperts, mesh: DeviceMesh) -> None:
    experts = model.experts
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["ep"], (Shard(0),)))
    fully_shard(experts, mesh=mesh["fsdp"])
    fully_shard(model, mesh=flatten_mesh(mesh))


def batch() -> torch.Tensor:
    return torch.randn(120, FEATURES)


def step(model: MixtureOfExperts, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    loss = model(tokens).square().mean()
    loss.backward()
    # Summed over ep by the tokens that arrived; FSDP averaged it over fsdp.
    model.experts.weight.grad.to_local().div_(mesh["ep"].size())
    return loss


if __name__ == "__main__":
    shardviz.run_probe(__file__)
