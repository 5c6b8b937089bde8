"""Models, and ways to save and load them: right ones, and the same with one mistake each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    Move = Callable[[nn.Module, Any, Path], Any]


class Net(nn.Module):
    """Tied weights, a frozen one, uneven sizes, statistics, flags, and a buffer that is in no checkpoint."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 10)
        self.up = nn.Linear(10, 23)
        self.mid = nn.Linear(23, 23)
        self.other = nn.Linear(23, 23)
        self.down = nn.Linear(23, 10)
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 16, bias=False)
        self.head.weight = self.embed.weight
        self.other.bias.requires_grad_(False)
        self.register_buffer("mask", torch.ones(9, dtype=torch.bool))
        self.register_buffer("freq", torch.ones(9), persistent=False)


def fsdp(mesh: DeviceMesh) -> nn.Module:
    model = Net()
    fully_shard(model, mesh=mesh)
    return model


def tp(mesh: DeviceMesh) -> nn.Module:
    model = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def offloaded(mesh: DeviceMesh) -> nn.Module:
    model = Net()
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return model


def experts(mesh: DeviceMesh) -> nn.Module:
    weight = distribute_tensor(torch.randn(7, 6, 4), mesh["ep"], [Shard(0)])
    return nn.ParameterDict({"w1": nn.Parameter(weight), "gate": nn.Parameter(torch.randn(7, 4))})


class Stage(nn.Module):
    """The layers of one stage of a pipeline, by their numbers in the whole."""

    def __init__(self, own: int, count: int) -> None:
        super().__init__()
        layers = {str(number): nn.Linear(12, 12) for number in range(4) if number * count // 4 == own}
        self.layers = nn.ModuleDict(layers)


def stages(mesh: DeviceMesh) -> nn.Module:
    model = Stage(mesh.get_local_rank("pp"), mesh["pp"].size())
    fully_shard(model, mesh=mesh["dp"])
    return model


def by_hand(mesh: DeviceMesh) -> nn.Module:
    """Cut a weight by hand: a plain tensor on each rank, which no placements describe."""
    own = torch.randn(8, 4).chunk(mesh.size())[mesh.get_local_rank()].clone()
    return nn.ParameterDict({"cut": nn.Parameter(own), "norm": nn.Parameter(torch.ones(4))})


def adam(model: nn.Module) -> Optimizer:
    """AdamW with two groups, one of them without decay."""
    own = [one for one in model.parameters() if one.ndim > 1]
    rest = [one for one in model.parameters() if one.ndim <= 1]
    groups = [{"params": own}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)


def fused(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# Right


def save_dcp(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)


def load_dcp(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def save_whole(model: nn.Module, optimizer: Any, folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    both = get_state_dict(model, optimizer, options=options)
    if distributed.get_rank() == 0:
        torch.save(both, folder / "whole.pt")


def load_whole(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, states = torch.load(folder / "whole.pt", weights_only=False)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


def save_own(model: nn.Module, optimizer: Any, folder: Path) -> None:
    torch.save((model.state_dict(), optimizer.state_dict()), folder / f"{distributed.get_rank()}.pt")


def load_own(model: nn.Module, optimizer: Any, folder: Path) -> None:
    _load(model, optimizer, folder / f"{distributed.get_rank()}.pt")


def _load(model: nn.Module, optimizer: Any, file: Path) -> None:
    weights, states = torch.load(file, weights_only=False)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)


def save_weights(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Write whole weights as one safetensors file."""
    from safetensors.torch import save_file

    weights = {name: _whole(one).clone() for name, one in model.state_dict().items()}
    if distributed.get_rank() == 0:
        save_file(weights, folder / "model.safetensors")


def load_weights(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Read whole weights and keep this rank's part."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, one in model.state_dict().items():
            whole = weights[name]
            one.copy_(distribute_tensor(whole, one.device_mesh, one.placements) if _is_cut(one) else whole)


def save_renamed(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Write whole weights under other names, all of them behind `model.`."""
    from safetensors.torch import save_file

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if distributed.get_rank() == 0:
        tensors = {f"model.{name}": value.clone().contiguous() for name, value in weights.items()}
        save_file(tensors, folder / "model.safetensors")


def load_renamed(model: nn.Module, optimizer: Any, folder: Path) -> None:
    from safetensors.torch import load_file

    read = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("model."): value for name, value in read.items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def load_sent(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Read whole weights on rank 0 alone, which sends them."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors") if distributed.get_rank() == 0 else {}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def save_hf(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights = get_model_state_dict(model)
    files = dict.fromkeys(weights, 1)
    writer = dcp.HuggingFaceStorageWriter(str(folder), files, save_distributed=True, enable_consolidation=True)
    dcp.save(weights, storage_writer=writer)


def load_hf(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights = get_model_state_dict(model)
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


def raise_on_one_rank(model: nn.Module, optimizer: Any, folder: Path) -> None:
    if distributed.get_rank() == distributed.get_world_size() - 1:
        raise OSError("the disk is full")


def load_into_new(model: nn.Module, optimizer: Any, folder: Path) -> Any:
    """Build the model again, load that, and return it."""
    made = fsdp(model.get_parameter("embed.weight").device_mesh)
    own = adam(made)
    load_dcp(made, own, folder)
    return made, own


# Broken: a right load, and then what a mistake leaves


def nothing(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Load into copies."""
    weights = {name: one.clone() for name, one in get_model_state_dict(model).items()}
    dcp.load({"model": weights}, checkpoint_id=folder)


def not_on_one_rank(model: nn.Module, optimizer: Any, folder: Path) -> None:
    old = [_local(one).clone() for one in model.parameters()]
    load_dcp(model, optimizer, folder)
    if distributed.get_rank() == 1:
        for one, before in zip(model.parameters(), old, strict=True):
            _local(one).copy_(before)


def not_one_tensor(model: nn.Module, optimizer: Any, folder: Path) -> None:
    old = _local(model.get_parameter("mid.weight")).clone()
    load_dcp(model, optimizer, folder)
    _local(model.get_parameter("mid.weight")).copy_(old)


def not_some_rows(model: nn.Module, optimizer: Any, folder: Path) -> None:
    old = _local(model.get_parameter("mid.weight")).clone()
    load_dcp(model, optimizer, folder)
    _local(model.get_parameter("mid.weight"))[2:4] = old[2:4]


def no_buffers(model: nn.Module, optimizer: Any, folder: Path) -> None:
    old = {name: one.clone() for name, one in model.named_buffers()}
    load_dcp(model, optimizer, folder)
    for name, one in model.named_buffers():
        one.copy_(old[name])


def neighbors_moment(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    own = _local(optimizer.state[model.get_parameter("embed.weight")]["exp_avg"])
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, own.clone())
    own.copy_(parts[(distributed.get_rank() + 1) % len(parts)])


def moments_exchanged(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def state_by_order(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    one, other = model.get_parameter("mid.weight"), model.get_parameter("other.weight")
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


def no_step(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    for state in optimizer.state.values():
        state["step"].zero_()


def no_optimizer(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights = get_model_state_dict(model)
    dcp.load({"model": weights}, checkpoint_id=folder)


def no_settings(model: nn.Module, optimizer: Any, folder: Path) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    load_dcp(model, optimizer, folder)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def untied(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    model.get_submodule("head").weight = nn.Parameter(model.get_parameter("head.weight").detach().clone())


def assigned(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)


def through_bfloat16(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.bfloat16().float())


def moments_in_bfloat16(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


def no_second_moment(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    for state in optimizer.state.values():
        state["exp_avg_sq"].zero_()


def first_rank_everywhere(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    distributed.broadcast(_local(model.get_parameter("embed.weight")), 0)


def some_flags(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    model.get_buffer("mask")[3:5].logical_not_()


def in_rank_order(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Load the shards of a mesh that counts the other way round."""
    load_dcp(model, optimizer, folder)
    own = _local(model.get_parameter("embed.weight"))
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, own.clone())
    own.copy_(parts[len(parts) - 1 - distributed.get_rank()])


def doubled(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Sum moments over ranks that each have them."""
    load_dcp(model, optimizer, folder)
    for state in optimizer.state.values():
        _local(state["exp_avg"]).mul_(2)


def rows_backwards(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    own = _local(model.get_parameter("mid.weight"))
    own.copy_(own.flip(0))


def columns_rolled(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    own = _local(model.get_parameter("mid.weight"))
    own.copy_(own.roll(1, 1))


def names_exchanged(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    one, other = (_local(model.get_parameter(name)) for name in ("mid.weight", "other.weight"))
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def zeros_on_one_rank(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    if distributed.get_rank() == 1:
        _local(model.get_parameter("mid.bias")).zero_()


def roots_of_squares(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    for state in optimizer.state.values():
        _local(state["exp_avg_sq"]).sqrt_()


def one_step_less(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    for state in optimizer.state.values():
        state["step"].sub_(1)


def other_betas(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.95)


def variance_reset(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    model.get_buffer("norm.running_var").fill_(1)


def count_reset(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    model.get_buffer("norm.num_batches_tracked").zero_()


def one_nan(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    if distributed.get_rank() == 0:
        _local(model.get_parameter("mid.weight"))[0, 0] = float("nan")


def thawed(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    model.get_parameter("other.bias").requires_grad_(True)


def without_a_bias(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    model.get_submodule("other").register_parameter("bias", None)


def longer_mask(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    model.register_buffer("mask", model.get_buffer("mask").repeat(2))


def load_of_another_rank(model: nn.Module, optimizer: Any, folder: Path) -> None:
    _load(model, optimizer, folder / f"{1 - distributed.get_rank()}.pt")


def through_float16(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.half().float())


def state_of_one_lost(model: nn.Module, optimizer: Any, folder: Path) -> None:
    load_dcp(model, optimizer, folder)
    optimizer.state.pop(model.get_parameter("embed.weight"))


def save_turned(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Export with the rows of one weight in another order."""
    _turned(model)
    save_weights(model, optimizer, folder)
    _turned(model)


def load_turned(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Import, and undo what the export did."""
    load_weights(model, optimizer, folder)
    _turned(model)


def _turned(model: nn.Module) -> None:
    """Exchange the halves of one weight's columns: doing it twice changes nothing."""
    own = _local(model.get_parameter("embed.weight"))
    own.copy_(own.roll(own.shape[1] // 2, 1))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach()
    return own.to_local() if isinstance(own, DTensor) else own


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_cut(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)
