"""Megatron-core: experts, and plain weights born sharded, with `partition_dim` on each.

The mesh is what `parallel_state` says. Its axes are `pp`, `dp`, `cp` and `tp`; axes of one rank are left out.

`sharded_state_dict()` says where in the global tensor each rank's part is saved. It is what a checkpoint is made of, so
that it goes before the attributes of a weight if they differ. A factory has several parts of one weight: gate and up
of a gated MLP, each split by itself.

Each expert-parallel rank has other experts, which it numbers from 0. They are distinguished by their global numbers, as
in a checkpoint of a model without expert parallel. Copies are on the ranks of the expert's own data-parallel group.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from shardviz.dump.records.tensors import FlatRecord
from shardviz.layout.mesh import Mesh
from shardviz.layout.placements import Placement, Replicate, Shard, StridedShard
from shardviz.live.capture.meshes import Claim, of_flat_param
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims.local import FlatParam, Local, not_understood, plain
from shardviz.live.compat.modules import clean_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from shardviz.dump.records.base import Role


AXES = {
    "pp": "get_pipeline_model_parallel_group",
    "dp": "get_data_parallel_group",
    "cp": "get_context_parallel_group",
    "tp": "get_tensor_model_parallel_group",
}
"""The functions of `parallel_state` that have the groups, outermost first."""


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return a weight of a Megatron layer or expert; None for others, Megatron's replicas among them."""
    if not is_up():
        return None
    if (expert := _of_expert(name, role, tensor)) is not None:
        return expert
    if not getattr(tensor, "tensor_model_parallel", False):
        return None
    marked: Any = tensor
    return _split(name, role, tensor, int(marked.partition_dim), int(marked.partition_stride), mesh)


def of_model(model: nn.Module, mesh: Mesh | None) -> Iterator[Local]:
    """Yield the weights whose modules save them otherwise than their attributes say."""
    ranks = ranks_of("get_tensor_model_parallel_group") if is_up() else ()
    cuts = cuts_of(model) if len(ranks) > 1 else {}
    for role, called, tensor in named_tensors(model) if cuts else ():
        name = clean_name(called)
        if name in cuts and getattr(tensor, "allreduce", True) is not False:
            local = _saved_local(name, role, tensor, cuts[name], mesh)
            if local is not None:
                yield local


def _saved_local(name: str, role: Role, tensor: torch.Tensor, cut: Cut | None, mesh: Mesh | None) -> Local | None:
    """Return a weight that is saved in another way than its attributes say; None for any other."""
    if cut is None:
        return not_understood(name, role, tensor, "its layout: its module saves it in parts of several sizes")
    if cut.dim < 0 or (cut.dim, cut.stride) == _marked_split(tensor):
        return None
    ranks = ranks_of("get_tensor_model_parallel_group")
    me = ranks.index(distributed.get_rank())
    if (cut.index, cut.count) != (me, len(ranks)):
        why = f"its layout: it is saved as part {cut.index} of {cut.count} on tensor-parallel rank {me} of {len(ranks)}"
        return not_understood(name, role, tensor, why)
    return _split(name, role, tensor, cut.dim, cut.stride, mesh)


def _marked_split(tensor: Any) -> tuple[int, int] | None:
    """Return the dim that a weight's attributes say is split, and its stride."""
    if not getattr(tensor, "tensor_model_parallel", False):
        return None
    return int(tensor.partition_dim), int(tensor.partition_stride)


def _split(name: str, role: Role, tensor: torch.Tensor, dim: int, stride: int, mesh: Mesh | None) -> Local | None:
    """Return a weight that is split over the tensor-parallel ranks; None if there is one only."""
    ranks = ranks_of("get_tensor_model_parallel_group")
    if len(ranks) == 1:
        return None
    shape = list(tensor.shape)
    shape[dim] *= len(ranks)
    local = plain(name, role, tensor)
    return Local(name, role, tuple(shape), local.values, _claim(ranks, dim, stride, mesh), grad=local.grad)


def marks(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a split weight of a Megatron layer."""
    return bool(getattr(tensor, "tensor_model_parallel", False)) and is_up()


def groups_of(model: nn.Module) -> dict[str, Any]:
    """Return Megatron's groups of several ranks by axis, if the model has a Megatron layer."""
    is_marked = any(hasattr(tensor, "partition_dim") for _, _, tensor in named_tensors(model))
    is_used = is_up() and (is_marked or any(hasattr(module, "sharded_state_dict") for module in model.modules()))
    groups = {axis: group(get) for axis, get in AXES.items()} if is_used else {}
    return {axis: process_group for axis, process_group in groups.items() if process_group.size() > 1}


def _claim(ranks: tuple[int, ...], dim: int, stride: int, mesh: Mesh | None) -> Claim:
    split: Placement = Shard(dim) if stride == 1 else StridedShard(dim, stride)
    for axis in mesh.axes if mesh is not None else ():
        assert mesh is not None
        if ranks in mesh.groups(axis):
            return mesh, tuple(split if axis == name else Replicate() for name in mesh.axes)
    return Mesh(("tp",), (len(ranks),), ranks), (split,)


def is_up() -> bool:
    """Whether `parallel_state` has the groups of a model."""
    state = _state()
    return state is not None and bool(state.model_parallel_is_initialized())


def group(get: str) -> Any:
    """Return the group that a function of `parallel_state` returns."""
    return getattr(_state(), get)()


def ranks_of(get: str) -> tuple[int, ...]:
    """Return the ranks of a `parallel_state` function's group; only this rank if there is none."""
    process_group = getattr(_state(), get)(check_initialized=False) if get.startswith("get_expert") else group(get)
    return (
        tuple(distributed.get_process_group_ranks(process_group))
        if process_group is not None
        else (distributed.get_rank(),)
    )


def _state() -> Any:
    return sys.modules.get("megatron.core.parallel_state")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight is split.

    Attributes:
        dim: The dim that is split; -1 if none is.
        stride: The segments of that dim that are split each by itself.
        index: Which part this rank has.
        count: The number of parts.
    """

    dim: int
    stride: int
    index: int
    count: int


def cuts_of(model: nn.Module) -> dict[str, Cut | None]:
    """Return how each weight is saved, by name; None unless one dim is split evenly."""
    if "megatron.core.dist_checkpointing.mapping" not in sys.modules:
        return {}
    cuts: dict[str, Cut | None] = {}
    with torch.no_grad():
        for prefix, module in _outermost(model):
            cuts |= {clean_name(name): _cut(parts) for name, parts in _parts(module, prefix)}
    return cuts


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that say how they are saved."""
    done: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if hasattr(module, "sharded_state_dict") and not any(name.startswith(prefix_done) for prefix_done in done):
            done += (f"{name}." if name else "",)
            yield f"{name}." if name else "", module


def _parts(module: Any, prefix: str) -> Iterator[tuple[str, list[Any]]]:
    try:
        saved = module.sharded_state_dict(prefix=prefix)
    except Exception:  # a module of somebody else's, or one that needs what the job has not set up yet
        return
    for name, saved_tensor in saved.items():
        parts = saved_tensor.build() if hasattr(saved_tensor, "build") else saved_tensor
        listed = list(parts) if isinstance(parts, list | tuple) else [parts]
        if all(hasattr(part, "axis_fragmentations") for part in listed):
            yield name, listed


def _cut(parts: Sequence[Any]) -> Cut | None:
    """Return the one dim that parts split evenly, in order; None for any other split."""
    first = parts[0]
    skip = first.prepend_axis_num
    fragments = [tuple(part.axis_fragmentations or ())[skip:] for part in parts]
    local = tuple(first.local_shape)
    split = [dim for dim, count in enumerate(fragments[0]) if count > 1]
    if not split and len(parts) == 1:
        return Cut(-1, 1, 0, 1)
    alike = all(
        tuple(part.local_shape) == local and fragment == fragments[0]
        for part, fragment in zip(parts, fragments, strict=True)
    )
    if len(split) != 1 or not alike or fragments[0][split[0]] % len(parts) or first.flattened_range is not None:
        return None
    dim = split[0]
    count = fragments[0][dim] // len(parts)
    places = [part.global_offset[skip + dim] // max(local[dim], 1) for part in parts]
    index = places[0]
    is_even = places == [number * count + index for number in range(len(parts))]
    return Cut(dim if count > 1 else -1, len(parts), index, count) if is_even else None


EXPERTS = ".local_experts."


def numbers(model: nn.Module) -> dict[str, str]:
    """Return the global numbers of experts, and of layers on a stage of a pipeline, by their modules' names."""
    of_modules: dict[str, str] = {}
    for prefix, module in model.named_modules() if is_up() else ():
        indices = getattr(module, "local_expert_indices", None)
        experts = getattr(getattr(module, "experts", None), "local_experts", None)
        layers: Any = getattr(module, "layers", None)
        within = f"{prefix}." if prefix else ""
        if indices is not None and isinstance(experts, nn.ModuleList) and len(indices) == len(experts):
            of_modules |= {f"{within}experts{EXPERTS}{at}": str(number) for at, number in enumerate(indices)}
        counts: list[Any] = (
            [getattr(layer, "layer_number", None) for layer in layers] if isinstance(layers, nn.ModuleList) else []
        )
        if all(isinstance(count, int) for count in counts):
            of_modules |= {f"{within}layers.{at}": str(count - 1) for at, count in enumerate(counts) if count}
    return {name: number for name, number in of_modules.items() if name.rpartition(".")[2] != number}


def stand_ins(parameter: Any) -> Iterator[object]:
    """Yield the master copy that is stepped in a parameter's place; the distributed optimizer steps views otherwise."""
    main = getattr(parameter, "main_param", None)
    if main is not None:
        yield main


def gradients(weights: Mapping[torch.Tensor, Local], stepper: Any, stepped: Collection[int]) -> Iterator[Local]:
    """Yield this rank's part of the gradients of master copies, and of shards of the distributed optimizer."""
    for optimizer in getattr(stepper, "chained_optimizers", [stepper]) if is_up() else ():
        shards = _shards(optimizer, stepped) if hasattr(optimizer, "shard_fp32_groups") else {}
        for buffer in optimizer.buffers if shards else ():
            ranks = tuple(distributed.get_process_group_ranks(buffer.data_parallel_group))
            for bucket in buffer.buckets:
                for parameter in (parameter for parameter in bucket.params_list if parameter in weights):
                    place = ranks, buffer.param_index_map[parameter][0] - bucket.offset, bucket.grad_data.numel()
                    yield _of_bucket(weights[parameter], parameter, place, shards.get(id(parameter)))
    for parameter, weight in weights.items():
        main = getattr(parameter, "main_param", None)
        if main is not None and id(main) in stepped and main.shape == parameter.shape and main.grad is not None:
            yield replace(weight, role="grad", values=main.grad, grad=None)


def _shards(optimizer: Any, stepped: Collection[int]) -> dict[int, torch.Tensor]:
    """Return what the distributed optimizer steps now of parameters, by their identity."""
    groups = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    return {
        id(parameter): shard
        for models, of_models in groups
        for params, shards in zip(models, of_models, strict=True)
        for parameter, shard in zip(params, shards, strict=True)
        if id(shard) in stepped
    }


def _of_bucket(
    weight: Local, parameter: torch.Tensor, place: tuple[tuple[int, ...], int, int], shard: torch.Tensor | None
) -> Local:
    """Return this rank's stretch of a gradient in a bucket, which is divided evenly among the data-parallel ranks.

    Args:
        place: These ranks, its first element in the bucket, and the bucket's number of elements.
        shard: This rank's stretch of the parameter; None if it has none.
    """
    shape, (ranks, offset, total) = tuple(parameter.shape), place
    values = parameter.new_empty(0) if shard is None or shard.grad is None else shard.grad
    if len(ranks) == 1 and values.numel() == parameter.numel():
        return replace(weight, role="grad", values=values.view(shape), grad=None)
    if weight.claim is not None:
        why = "its gradient: a rank of megatron-core's distributed optimizer has a stretch of a tensor-parallel part"
        return not_understood(weight.name, "grad", parameter, why)
    param = FlatParam.in_buffers(weight.name, shape, ranks, values, total // len(ranks), offset)
    return Local(
        weight.name, "grad", shape, values, of_flat_param(param, None, "dp"), (FlatRecord(shape, offset), total)
    )


def _of_expert(name: str, role: Role, tensor: torch.Tensor) -> Local | None:
    """Return an expert's weight; None for other tensors, or if all ranks have all experts."""
    if getattr(tensor, "allreduce", True) is not False:
        return None
    if len(ranks_of("get_expert_model_parallel_group")) == 1:
        return None
    if EXPERTS not in name:
        why = "its elements: megatron-core has several experts in it, and expert-parallel ranks have other experts"
        return not_understood(name, role, tensor, why)
    copies, parts = ranks_of("get_expert_data_parallel_group"), ranks_of("get_expert_tensor_parallel_group")
    is_split = bool(getattr(tensor, "tensor_model_parallel", False)) and len(parts) > 1
    if len(parts) > 1 and len(copies) > 1:
        why = "its layout: it is an expert's weight in megatron-core, under expert tensor and data parallel at once"
        return not_understood(name, role, tensor, why)
    local, shape = plain(name, role, tensor), list(tensor.shape)
    placement: Placement = Replicate()
    if is_split:
        dim, stride = int(tensor.partition_dim), int(tensor.partition_stride)  # type: ignore[attr-defined]
        placement = Shard(dim) if stride == 1 else StridedShard(dim, stride)
        shape[dim] *= len(parts)
    on = Mesh(("etp",), (len(parts),), parts) if len(parts) > 1 else Mesh(("edp",), (len(copies),), copies)
    return Local(name, role, tuple(shape), local.values, (on, (placement,)), grad=local.grad)
