"""Weights from a trainer to an engine: FSDP2 over all ranks there, fused and split over tp here.

A trainer in reinforcement learning sends its weights to an inference engine after every step. It has q, k and v by
themselves, under FSDP2; the engine has them fused, and each of its ranks has its part of q, then of k, then of v:
`[36/3/tp, 12]`, three segments, each split over tp. Cut in one piece, `[36/tp, 12]`, rank 0 would have most of q and
nothing of v: right shape, wrong rows, no error.

`shardviz.testing.assert_transferred` does the same with your own trainer, engine and sync, and names a stale or wrong
slice by its tensor, its rank and its rows.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # torch has no public name for it

import shardviz
from shardviz.probes._trips import NEVER

AXES = ("dp", "tp")
MESH = (2, 2)
BATCH_AXES = ("dp",)

PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "out": ("out",), "down": ("down",)}
SPLIT = {
    "qkv": _StridedShard(0, split_factor=3),
    "gate_up": _StridedShard(0, split_factor=2),
    "out": Shard(1),
    "down": Shard(1),
}

expect = {"qkv": "[*/3/tp, *]", "gate_up": "[*/2/tp, *]", "out": "[*, */tp]", "down": "[*, */tp]"}


def build() -> nn.Module:
    """Build the engine's model, unsharded: its weights are what the trainer is given too."""
    shapes = {"qkv": (36, 12), "gate_up": (48, 12), "out": (12, 12), "down": (12, 24)}
    return nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})


def parallelize(model: nn.ParameterDict, mesh: DeviceMesh) -> nn.Module:
    trainer = trainer_of(model, mesh)
    engine = engine_of(model, mesh)
    sync(trainer, engine, mesh)
    return engine


def trainer_of(model: nn.ParameterDict, mesh: DeviceMesh) -> nn.Module:
    """Return the trainer: every weight by itself, under FSDP2 over all ranks."""
    weights = {
        name_part: nn.Parameter(piece.clone())
        for name, parts in PARTS.items()
        for name_part, piece in zip(parts, model[name].detach().chunk(len(parts)), strict=True)
    }
    trainer = nn.ParameterDict(weights)
    fully_shard(trainer, mesh=init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("fsdp",)))
    return trainer


def engine_of(model: nn.ParameterDict, mesh: DeviceMesh) -> nn.ParameterDict:
    """Return the engine, which has no weights yet: fused ones, split over tp part by part."""
    weights = {}
    for name, whole in model.items():
        local = torch.cat([own_part(part, name, mesh) for part in whole.detach().chunk(len(PARTS[name]))])
        placements = [Replicate(), SPLIT[name]]
        size = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
        weights[name] = nn.Parameter(DTensor.from_local(torch.full_like(local, NEVER), mesh, placements, **size))
    return nn.ParameterDict(weights)


def own_part(whole: torch.Tensor, name: str, mesh: DeviceMesh) -> torch.Tensor:
    """Return the part of one tensor of the trainer that this rank's tensor of the engine has."""
    dim = 1 if name in ("out", "down") else 0
    chunks, at = whole.chunk(mesh["tp"].size(), dim), mesh.get_local_rank("tp")
    return chunks[at] if at < len(chunks) else whole.narrow(dim, 0, 0)


def sync(trainer: nn.Module, engine: nn.ParameterDict, mesh: DeviceMesh) -> None:
    """Send the trainer's weights: gathered one by one, and each rank keeps its part."""
    with torch.no_grad():
        for name, parts in PARTS.items():
            wholes = [trainer.get_parameter(part).full_tensor() for part in parts]
            engine[name].to_local().copy_(torch.cat([own_part(whole, name, mesh) for whole in wholes]))


if __name__ == "__main__":
    shardviz.run_probe(__file__)
