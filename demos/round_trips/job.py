"""A model under FSDP2, its optimizer, and two ways to save and load both."""

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))


def build(mesh):
    model = Model()
    fully_shard(model, mesh=mesh)
    return model


def adamw(model):
    layers = [model.up.weight, model.down.weight]
    return torch.optim.AdamW([{"params": layers}, {"params": [model.embed.weight], "lr": 1e-4}])


def save_by_number(model, optimizer, folder):
    weights = {name: one.full_tensor() for name, one in model.state_dict().items()}
    states = [optimizer.state[one] for one in model.parameters()]
    whole = [{key: one.full_tensor() if key != "step" else one for key, one in state.items()} for state in states]
    if distributed.get_rank() == 0:
        torch.save((weights, whole), folder / "all.pt")


def load_by_number(model, optimizer, folder):
    weights, states = torch.load(folder / "all.pt")
    model.load_state_dict({name: cut(weights[name], one) for name, one in model.state_dict().items()})
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for one, state in zip(parameters, states, strict=True):
        optimizer.state[one] = {key: cut(value, one) if key != "step" else value for key, value in state.items()}


def cut(whole, like):
    return distribute_tensor(whole, like.device_mesh, like.placements)


def save(model, optimizer, folder):
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)


def load(model, optimizer, folder):
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
