"""Expert parallel with FSDP2: two meshes in one model, the same ranks cut in two ways.

Experts are dealt out over ep, and each rank's stretch of them is split again over fsdp: `[8/ep/fsdp, 12, 12]`. The rest
of the model, here the router, knows nothing of experts: it is split over all ranks, fsdp and ep flattened to one axis,
`[8/fsdp_ep, 12]`. So a gather of experts runs over fsdp only, a gather of the router over everybody, and tokens travel
over ep; gradients are averaged, and split again, over the same ranks that were gathered. The batch is split over both.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.live.compat import Shard, distribute_tensor, flatten_mesh, fully_shard
from shardviz.probes._experts import FEATURES, MixtureOfExperts
from shardviz.probes._refusals import refuse_empty

AXES = ("fsdp", "ep")
MESH = (2, 2)
BATCH_AXES = ("fsdp", "ep")
TORCH = (2, 6)

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
    model.experts.weight.grad.to_local().div_(mesh["ep"].size())  # tokens summed it over ep, FSDP averaged over fsdp
    return loss


if __name__ == "__main__":
    shardviz.run_probe(__file__)
