"""Expert parallel: each rank has some of the experts, and tokens travel to their experts and back.

The experts' matrices are one tensor, whose dim 0 is split over ep: `[8/ep, 12, 12]`. The batch is split over ep too. A
router, which is whole on every rank, chooses an expert for each token. One all_to_all sends tokens to the ranks that
have their experts, and another brings the results back. The number of tokens that go to each rank differs from batch to
batch, so two small all_to_all exchange the counts first. Experts are not copied and their gradients are not summed,
because every token of every rank comes to the one place where its expert is; but each rank's loss is a mean over its
own tokens, so the experts' gradients are still divided by the number of ranks. The router's gradients are averaged over
ep, as in data parallel.
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._experts import FEATURES, MixtureOfExperts
from shardviz.probes._refusals import refuse_empty

AXES = ("ep",)
MESH = (4,)
BATCH_AXES = ("ep",)

EXPERTS = 8

expect = {"experts.weight": "[*/ep, *, *]", "router.weight": "[*, *] =ep"}


def check_mesh(mesh: Mesh) -> None:
    refuse_empty(mesh, "ep", EXPERTS, "experts", "a rank without experts would only pass tokens on")


def build() -> nn.Module:
    return MixtureOfExperts(EXPERTS)


def parallelize(model: MixtureOfExperts, mesh: DeviceMesh) -> None:
    experts = model.experts
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["ep"], (Shard(0),)))


def batch() -> torch.Tensor:
    return torch.randn(120, FEATURES)


def step(model: MixtureOfExperts, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    loss = model(tokens).square().mean()
    loss.backward()
    ranks = mesh["ep"].size()
    model.experts.weight.grad.to_local().div_(ranks)
    distributed.all_reduce(model.router.weight.grad, group=mesh.get_group("ep"))
    model.router.weight.grad.div_(ranks)
    return loss


if __name__ == "__main__":
    shardviz.run_probe(__file__)
