"""A tied embedding and head, separated by sharding: two parameters that start equal and drift (FMS PR 331).

The head's weight is the embedding's. `parallelize_module` replaces each module's parameters by new, sharded ones, after
which the two names are two tensors. They are equal at first, each gets its own half of the gradient, and they drift
apart. (foundation-model-stack PR 331)
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz

AXES = ("tp",)
MESH = (2,)
KINDS = ("untied",)


def build() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(12, 8), "head": nn.Linear(8, 12, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
