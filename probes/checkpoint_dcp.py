"""A checkpoint from mesh to mesh by torch.distributed.checkpoint: 2,4 to 4,2 to 8 to 1 and home again.

FSDP2 over tensor parallel on (fsdp, tp) is saved, loaded on (tp, fsdp), saved there, and so on: on all ranks in a row,
on one rank alone, and on the mesh that it came from. DCP writes a file for each rank, and `.metadata`, which says what
part of which tensor each piece is; a load reads the pieces that overlap with what a rank has. So the numbers of ranks
before and after need not divide each other. Before each load the model is filled with -1, so that a load that does
nothing would show.

`shardviz.testing.assert_checkpoint_roundtrip` does the same with your own save and load, and with the optimizer.
"""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.probes._models import Blocks
from shardviz.probes._trips import there_and_back

AXES = ("fsdp", "tp")
MESH = (2, 4)
BATCH_AXES = ("fsdp",)

expect = {
    "*.up.weight": "[*/tp/fsdp, *]",
    "*.up.bias": "[*/tp/fsdp]",
    "*.down.weight": "[*/fsdp, */tp]",
    "*.down.bias": "[*/fsdp]",
}


def build() -> nn.Module:
    return Blocks(2)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    dtype = next(model.parameters()).dtype
    return there_and_back(shard(model, mesh), mesh, lambda other: shard(build().to(dtype), other), save, load)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def save(model: nn.Module, folder: Path) -> None:
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)


def load(model: nn.Module, folder: Path) -> None:
    weights = get_model_state_dict(model)
    dcp.load(weights, checkpoint_id=folder)
    set_model_state_dict(model, weights)


if __name__ == "__main__":
    shardviz.run_probe(__file__)
