"""1F1B: as soon as a micro-batch has come out at the end it goes back, one forward, one backward, in turn.

The bubble is that of GPipe, (p - 1) / (m + p - 1): filling and draining take as long. What is saved is memory: a stage
has at most p micro-batches under way, not m, so m can grow, and with it the bubble shrinks. torch wants m >= p.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B

import shardviz
from shardviz.errors import ProbeError
from shardviz.mesh import Mesh
from shardviz.probes._models import Blocks
from shardviz.probes._pipeline import LAYERS, layers_of, mean_square, refuse_idle_stages, run, stage_of

AXES = ("pp",)
MESH = (4,)
STAGE_AXES = ("pp",)
TORCH = (2, 6)

MICROBATCHES = 8


def check_mesh(mesh: Mesh) -> None:
    refuse_idle_stages(mesh)
    if mesh.axis_size("pp") > MICROBATCHES:
        raise ProbeError(
            f"pp({mesh.axis_size('pp')}) stages need as many micro-batches, there are {MICROBATCHES}: torch raises "
            "where the number of micro-batches is less than the number of stages",
            f"take pp of at most {MICROBATCHES}",
        )


def build() -> nn.Module:
    return Blocks(LAYERS)


def parallelize(model: Blocks, mesh: DeviceMesh) -> None:
    mine = layers_of(mesh.get_local_rank("pp"), mesh["pp"].size())
    model.layers = nn.ModuleDict({name: layer for name, layer in model.layers.items() if name in mine})


def stages(model: Blocks, mesh: DeviceMesh) -> dict[int, nn.Module]:
    return {mesh.get_local_rank("pp"): model}


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


def step(model: nn.Module, rows: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    stage = stage_of(model, mesh.get_local_rank("pp"), mesh["pp"].size(), rows, MICROBATCHES, mesh)
    return run(Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_square), rows, mesh)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
