"""1F1B: a micro-batch runs backward as soon as it has passed the last stage, so ranks alternate forward and backward.

The model, its stages and its batch are those of `pp_gpipe`: each rank along pp has its own layers, sends their output
to the next rank, and gets back its gradient; no weight is copied and no gradient is summed over ranks. Only the
schedule differs. The bubble is the same as GPipe's, (p - 1) / (m + p - 1), because filling and draining take as long.
1F1B saves memory: the first stage has at most p micro-batches under way and the last stage one, where GPipe has m. So m
can grow, which shrinks the bubble. `shardviz show DUMP --schedule` draws the schedule; `--memory` counts the
activations under way.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B

import shardviz
from shardviz.probes._pipeline import mean_square, run, stage_of
from shardviz.probes.pp_gpipe import batch, build, check_mesh, parallelize, stages

AXES = ("pp",)
MESH = (4,)
STAGE_AXES = ("pp",)
TORCH = (2, 7)  # the schedules of 2.6 do not divide gradients by the number of micro-batches

MICROBATCHES = 8

__all__ = ["batch", "build", "check_mesh", "parallelize", "stages"]


def step(model: nn.Module, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    stage = stage_of(model, mesh.get_local_rank("pp"), mesh["pp"].size(), rows, MICROBATCHES, mesh)
    return run(Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_square), rows, mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
