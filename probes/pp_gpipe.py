"""GPipe: the batch is cut into micro-batches, which follow each other through the pipeline.

Each rank along pp is a stage: it has some consecutive layers, whole, that no other rank has. It sends their output to
the next rank, and in backward it sends the gradient of its input to the rank before; no weight is copied and no
gradient is summed over ranks. All micro-batches run forward, then all run backward, so stages work at the same time
once the pipeline is full. With p stages and m micro-batches, a fraction (p - 1) / (m + p - 1) of the time is idle,
while the pipeline fills and drains. Every stage keeps the activations of all m micro-batches until their backward. A
stage adds up the gradients of its micro-batches and divides them by m, so the step is the same as for the whole batch.
`shardviz show DUMP --schedule` draws the schedule.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import ScheduleGPipe

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._models import Blocks
from shardviz.probes._pipeline import LAYERS, keep, layers_of, mean_square, refuse_idle_stages, run, stage_of

AXES = ("pp",)
MESH = (4,)
STAGE_AXES = ("pp",)
TORCH = (2, 7)  # the schedules of 2.6 do not divide gradients by the number of micro-batches

MICROBATCHES = 8


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
    stage = stage_of(model, mesh.get_local_rank("pp"), mesh["pp"].size(), rows, MICROBATCHES, mesh)
    return run(ScheduleGPipe(stage, MICROBATCHES, loss_fn=mean_square), rows, mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
