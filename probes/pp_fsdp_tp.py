"""3-D parallel: layers over pp, each weight over tp, each part again over fsdp.

From the outside in: a pipeline's stage is a model of its own, so it is parallelized like one, on the part of the mesh
that has its pp coordinate. Layers on different stages are on different meshes, and a DTensor's placements describe only
its own mesh: `[24/tp/fsdp, 12]` on 2 x 2 of the 8 ranks. Activations go from stage to stage over pp and are summed over
tp. The batch is split over fsdp, where weights are gathered and gradients averaged and split. Nothing is summed over
pp. FSDP gathers once per step (`reshard_after_forward=False`): otherwise it would gather again for every micro-batch.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.probes._models import Blocks
from shardviz.probes._pipeline import keep, layers_of, mean_square, run, stage_of
from shardviz.probes.pp_gpipe import batch, build, check_mesh, stages

AXES = ("pp", "fsdp", "tp")
MESH = (2, 2, 2)
BATCH_AXES = ("fsdp",)
STAGE_AXES = ("pp",)
TORCH = (2, 7)  # the schedules of 2.6 do not divide gradients by the number of micro-batches

MICROBATCHES = 4

expect = {
    "*.up.weight": "[*/tp/fsdp, *]",
    "*.up.bias": "[*/tp/fsdp]",
    "*.down.weight": "[*/fsdp, */tp]",
    "*.down.bias": "[*/fsdp]",
}

__all__ = ["batch", "build", "check_mesh", "stages"]


def parallelize(model: Blocks, mesh: DeviceMesh) -> None:
    keep(model, layers_of(mesh.get_local_rank("pp"), mesh["pp"].size()))
    for layer in model.layers.values():
        up = ColwiseParallel(use_local_output=False)  # a DTensor knows its global size, even if tp does not divide 24
        parallelize_module(layer, mesh["tp"], {"up": up, "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["fsdp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["fsdp"], reshard_after_forward=False)


def step(model: nn.Module, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    stage = stage_of(model, mesh.get_local_rank("pp"), mesh["pp"].size(), rows, MICROBATCHES, mesh)
    return run(Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_square), rows, mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
