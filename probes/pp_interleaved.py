"""Interleaved 1F1B: every rank has several stages that are not neighbors, so the pipeline fills sooner.

With v stages per rank, rank r of p has the stages r, r + p, r + 2p, ...; a micro-batch goes round v times. So a rank's
layers are not consecutive: with eight layers, p = 4 and v = 2, rank 0 has layers 0 and 4, whole, and no other rank has
them. No weight is copied and no gradient is summed over ranks. A stage is v times shorter, and so are filling and
draining: the bubble is (p - 1) / (v * m + p - 1). The price is v times as many sends, and more micro-batches under way
at once than under 1F1B.
"""

from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import ScheduleInterleaved1F1B

import shardviz
from shardviz.layout.mesh import Mesh
from shardviz.probes._models import Blocks
from shardviz.probes._pipeline import keep, layers_of, mean_square, piece, refuse_idle_stages, run, stage_of
from shardviz.probes.pp_gpipe import batch, build

AXES = ("pp",)
MESH = (4,)
STAGE_AXES = ("pp",)
TORCH = (2, 8)  # 2.6 does not divide gradients by the number of micro-batches; on gloo this schedule hangs in 2.7.1

STAGES_PER_RANK = 2
MICROBATCHES = 8

__all__ = ["batch", "build"]


def check_mesh(mesh: Mesh) -> None:
    refuse_idle_stages(mesh, STAGES_PER_RANK)


def parallelize(model: Blocks, mesh: DeviceMesh) -> None:
    ranks = mesh["pp"].size()
    numbers = range(mesh.get_local_rank("pp"), ranks * STAGES_PER_RANK, ranks)
    keep(model, [name for number in numbers for name in layers_of(number, ranks * STAGES_PER_RANK)])


@cache
def stages(model: Blocks, mesh: DeviceMesh) -> dict[int, nn.Module]:
    ranks = mesh["pp"].size()
    numbers = range(mesh.get_local_rank("pp"), ranks * STAGES_PER_RANK, ranks)
    return {number: piece(model, layers_of(number, ranks * STAGES_PER_RANK)) for number in numbers}


def step(model: Blocks, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    count = mesh["pp"].size() * STAGES_PER_RANK
    parts = stages(model, mesh).items()
    own_stages = [stage_of(part, number, count, rows, MICROBATCHES, mesh) for number, part in parts]
    return run(ScheduleInterleaved1F1B(own_stages, MICROBATCHES, loss_fn=mean_square), rows, mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
