"""DataParallel: one process drives all GPUs of a machine with threads. Kept for old code; it needs GPUs.

The first GPU holds the model, its gradients and its optimizer state. Before every forward the model is copied to all
other GPUs and the batch is scattered; the outputs are gathered on the first GPU, and in backward the gradients of the
copies are summed into its own. So the first GPU holds more than the others, and the others hold nothing between steps.
There are no ranks and no process group. DistributedDataParallel does the same with one process per GPU, copies the
model only once, at the start, and is faster even on one machine.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardviz
from shardviz.errors import ProbeError
from shardviz.layout.mesh import Mesh

AXES = ("process",)
MESH = (1,)


def check_mesh(mesh: Mesh) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        raise ProbeError(
            f"DataParallel spreads a batch over the GPUs of one process, but this machine has {num_gpus}",
            "it needs 2 or more; on CPUs, shardviz probe ddp does the same with one process per rank",
        )
    if mesh.size != 1:
        raise ProbeError(f"DataParallel runs in one process, not {mesh.size}", "--mesh 1")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.DataParallel(model.cuda())


def batch() -> torch.Tensor:
    return torch.randn(120, 12)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
