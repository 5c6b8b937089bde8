"""Adam's state from mesh to mesh: both moments of every weight, by the parameter's name.

The moments are stamped like weights: each is a buffer beside its parameter, moved into AdamW's state before a save and
out of it after the last load. `get_optimizer_state_dict` calls them `state.up.weight.exp_avg`; the optimizer itself
numbers parameters, and a checkpoint by number exchanges them as soon as a stage, a frozen layer or another order
shifts the numbers. On the way: the axes' sizes exchanged, all ranks in a row, one rank, and home.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardviz
from shardviz.probes._models import MLP
from shardviz.probes._trips import there_and_back

AXES = ("fsdp", "tp")
MESH = (2, 4)
BATCH_AXES = ("fsdp",)

MOMENTS = ("exp_avg", "exp_avg_sq")

expect = {
    "up.weight*": "[*/tp/fsdp, *]",
    "up.bias*": "[*/tp/fsdp]",
    "down.weight*": "[*/fsdp, */tp]",
    "down.bias*": "[*/fsdp]",
}


def build() -> nn.Module:
    model = MLP()
    for layer in layers_of(model):
        for name, parameter in list(layer.named_parameters()):
            for key in MOMENTS:
                layer.register_buffer(f"{name}_{key}", torch.randn_like(parameter), persistent=False)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule("up"), model.get_submodule("down")]


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    dtype = next(model.parameters()).dtype
    home = there_and_back(shard(model, mesh), mesh, lambda other: shard(build().to(dtype), other), save, load)
    with torch.no_grad():
        for name, parameter in home.named_parameters():
            parameter.copy_(model.get_parameter(name))  # the weights themselves stay; `checkpoint_dcp` moves those
    return home


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    moments = [dict(layer.named_buffers()) for layer in layers_of(model)]
    for layer, layer_moments in zip(layers_of(model), moments, strict=True):
        for name in layer_moments:
            delattr(layer, name)  # parallelize_module would make copies of buffers
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    for layer, layer_moments in zip(layers_of(model), moments, strict=True):
        for name, moment in layer_moments.items():
            parameter = layer.get_parameter(name.partition("_")[0]).detach()
            layer.register_buffer(name, cut_like(parameter, moment), persistent=False)
    return model


def cut_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Cut a moment as its parameter is: over tp, and each part again over fsdp."""
    moment = torch.zeros_like(parameter)
    assert isinstance(moment, DTensor)
    mesh = moment.device_mesh
    placements = dict(zip(mesh.mesh_dim_names or (), moment.placements, strict=True))
    for axis in ("tp", "fsdp"):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            chunks, at = whole.chunk(mesh[axis].size(), dim), mesh.get_local_rank(axis)
            whole = chunks[at] if at < len(chunks) else whole.narrow(dim, 0, 0)
    moment.to_local().copy_(whole)
    return moment


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW with the model's moments for its state."""
    optimizer = torch.optim.AdamW(model.parameters())
    for layer in layers_of(model):
        for name, parameter in layer.named_parameters():
            moments = {key: layer.get_buffer(f"{name}_{key}") for key in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
    return optimizer


def save(model: nn.Module, folder: Path) -> None:
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer_of(model))}, checkpoint_id=folder)


def load(model: nn.Module, folder: Path) -> None:
    optimizer = optimizer_of(model)
    states = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(states, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, states["optim"])
    for layer in layers_of(model):
        for name, parameter in layer.named_parameters():
            for key in MOMENTS:
                layer.get_buffer(f"{name}_{key}").copy_(optimizer.state[parameter][key])


if __name__ == "__main__":
    shardviz.run_probe(__file__)
