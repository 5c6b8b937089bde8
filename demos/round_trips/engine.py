"""A trainer under FSDP2, an engine that has gate and up in one weight, split over tp, and two ways to send."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def trainer_on(mesh):
    shapes = {"gate": (16, 8), "up": (16, 8), "down": (8, 16)}
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
    fully_shard(model, mesh=mesh)
    return model


def engine_on(mesh):
    size = mesh.size()
    return {"gate_up": torch.empty(32 // size, 8), "down": torch.empty(8, 16 // size)}


def send_in_one_piece(trainer, engine, mesh):
    whole = {name: weight.full_tensor() for name, weight in trainer.items()}
    gate_up = torch.cat([whole["gate"], whole["up"]])
    engine["gate_up"].copy_(gate_up.chunk(mesh.size())[mesh.get_local_rank()])
    engine["down"].copy_(whole["down"].chunk(mesh.size(), 1)[mesh.get_local_rank()])


def send_by_parts(trainer, engine, mesh):
    send_in_one_piece(trainer, engine, mesh)
    parts = [trainer[name].full_tensor().chunk(mesh.size())[mesh.get_local_rank()] for name in ("gate", "up")]
    engine["gate_up"].copy_(torch.cat(parts))
