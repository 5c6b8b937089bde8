"""A fused q,k,v projection under ColwiseParallel: rank 0 gets all of q where the model reads a third of each.

The weight is [Q; K; V], stacked, and the model splits its output in three. ColwiseParallel cuts the rows into tp equal
parts from top to bottom, so a rank's "q, k, v" are rows of q and half of k. Shapes agree, nothing raises. (Automodel PR
1324, pytorch#140069, DeepSpeed PR 3844)
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardviz

AXES = ("tp",)
MESH = (2,)
KINDS = ("wrong-segment",)

expect = {"wqkv.weight": "[*/3/tp, *]"}


def build() -> nn.Module:
    return nn.ModuleDict({"wqkv": nn.Linear(8, 24, bias=False)})


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"wqkv": ColwiseParallel()})


if __name__ == "__main__":
    shardviz.run_probe(__file__)
