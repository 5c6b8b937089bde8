"""A checkpoint in Hugging Face's format from mesh to mesh: experts over a group, the rest under HSDP.

DCP's writer for that format makes a safetensors file for each rank, whose header says what part of which tensor each
piece is, and joins them into whole tensors. They are loaded on a mesh with the sizes exchanged, on all ranks along
`replicate`, on one rank, and at home. Along `replicate` ranks have equal copies and one is written; experts are
split along `shard` by number, dim 0 of their stacked weights, and the router is split by rows.

Files of this format have whole tensors under the model's own names, so that any library can read them; optimizer state
has no place in it.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardviz
from shardviz.probes._trips import there_and_back

AXES = ("replicate", "shard")
MESH = (2, 4)
TORCH = (2, 9)
BATCH_AXES = ("replicate", "shard")

EXPERTS, FEATURES = 8, 12

expect = {"w1": "[*/shard, *, *]", "w2": "[*/shard, *, *]", "router.weight": "[*/shard, *]", "router.bias": "[*/shard]"}


class MoE(nn.Module):
    """Experts behind a router."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES))
        self.router = nn.Linear(FEATURES, EXPERTS)


def build() -> nn.Module:
    return MoE()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    dtype = next(model.parameters()).dtype
    return there_and_back(shard(model, mesh), mesh, lambda other: shard(build().to(dtype), other), save, load)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for name in ("w1", "w2"):
        split = distribute_tensor(getattr(model, name).detach(), mesh, (Replicate(), Shard(0)))
        setattr(model, name, nn.Parameter(split))
    fully_shard(model.router, mesh=mesh)
    return model


def save(model: nn.Module, folder: Path) -> None:
    weights = get_model_state_dict(model)
    files = dict.fromkeys(weights, 1)  # all tensors in one file once they are joined
    writer = dcp.HuggingFaceStorageWriter(str(folder), files, save_distributed=True, enable_consolidation=True)
    dcp.save(weights, storage_writer=writer)


def load(model: nn.Module, folder: Path) -> None:
    weights = get_model_state_dict(model)
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
