"""DeepSpeed's ZeRO: parameters split over a group, and fragments of master copies.

ZeRO-3's parameters are flattened, padded and split over a group, then emptied. The padding behind `ds_numel` is
whatever was in memory, and is not looked at.

With ZeRO-1, ZeRO-2 and the bfloat16 optimizer weights are whole, and each rank's optimizer steps a part of a flat
buffer. `_hp_mapping` of a parameter says which of its elements the part has (`lp_fragment_address`) and where in the
part they are (`hp_fragment_address`). Tried on DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from shardviz.dump.records.tensors import FlatRecord
from shardviz.live.capture.meshes import of_flat_param
from shardviz.live.capture.stamp import named_tensors
from shardviz.live.claims.local import FlatParam, Local, not_understood
from shardviz.live.compat.modules import clean_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch

    from shardviz.dump.records.base import Role
    from shardviz.layout.mesh import Mesh


MASTER = "fp32"
"""What a master copy is called behind its parameter's name: as DeepSpeed's universal checkpoints call it."""


@dataclass(frozen=True)
class Fragment:
    """The elements of one parameter that this rank's optimizer steps.

    Attributes:
        name: The parameter's name in the unwrapped model.
        ranks: The ranks that its elements are divided among, in the group's order.
        start: The first element of the flattened parameter that this rank says it has.
        values: The master copy of these elements, one-dimensional; empty if the rank has none.
        weight: What they are copies of, one-dimensional: the whole flattened parameter, or the same elements of it.
        is_whole: Whether `weight` is the whole parameter.
        offset: The parameter's first element in the flat buffers of all ranks laid end to end; None if unknown.
        part: The elements of one rank's flat buffer; 0 if unknown.
        states: The optimizer's states of these elements by kind, such as `exp_avg`.
        group: Their process group.
        buffer: The number of the flat buffer among the optimizer's; -1 if the rank has no fragment.
        buffers: The states of the whole flat buffer by kind.
    """

    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    start: int
    values: torch.Tensor
    weight: torch.Tensor
    is_whole: bool
    offset: int | None = None
    part: int = 0
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    group: Any = None
    buffer: int = -1
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of elements that this rank has."""
        return self.values.numel()

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)


def of_tensor(name: str, role: Role, tensor: torch.Tensor, mesh: Mesh | None) -> Local | None:
    """Return this rank's range of a parameter that DeepSpeed partitioned; else None."""
    held: Any = getattr(tensor, "ds_tensor", None)
    if held is None:
        return None
    shape = tuple(int(size) for size in tensor.ds_shape)  # type: ignore[attr-defined]
    if why := _reason(held):
        return not_understood(name, role, tensor.new_empty(shape, device="meta"), why)
    param = _flat(name, shape, tensor, held)
    record = FlatRecord(shape, 0), param.total
    return Local(name, role, shape, param.cut(param.local), of_flat_param(param, mesh, "dp"), record)


def marks(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed has partitioned a parameter."""
    return hasattr(tensor, "ds_tensor")


def groups_of(model: nn.Module) -> dict[str, Any]:
    """Return the groups of a pipeline, or that which most parameters are split over: experts have smaller ones."""
    if (grid := grid_of(model)) is not None and grid.get_slice_parallel_world_size() == 1:
        of_grid = {"pp": grid.get_pipe_parallel_group(), "dp": grid.get_data_parallel_group()}
        return {axis: group for axis, group in of_grid.items() if group.size() > 1}
    groups = [param.ds_process_group for param in model.parameters() if hasattr(param, "ds_process_group")]
    return {"dp": max(groups, key=lambda group: group.size())} if groups else {}


def grid_of(model: nn.Module) -> Any:
    """Return what says where a pipeline's stage is; None if a model is no `PipelineModule`, or has one stage."""
    grid: Any = getattr(model, "_grid", None)
    return grid if hasattr(grid, "get_pipe_parallel_group") and grid.get_pipe_parallel_world_size() > 1 else None


def fragments(engine: nn.Module, model: nn.Module) -> list[Fragment]:
    """Return this rank's fragments of master copies and moments: of partitioned parameters, or else of buffers."""
    return list(_of_partitions(model)) or list(_of_buffers(engine, model))


def stand_ins(parameter: Any) -> Iterator[object]:
    """Yield the flat buffer that is stepped in a parameter's place, and its optimizer, which ZeRO-3 empties."""
    if (buffer := _buffer_of(parameter)) is not None:
        yield buffer
    zero3 = getattr(parameter, "_z3_optimizer", None)
    if zero3 is not None and marks(parameter) and parameter.requires_grad:
        yield zero3.fp32_partitioned_groups_flat[zero3.grad_position[zero3.get_param_id(parameter)][0]]
    zero = zero3 or getattr(parameter, "_zero_optimizer", None)
    if zero is not None:
        yield zero.optimizer


def gradients(weights: Mapping[torch.Tensor, Local], stepper: object, stepped: Collection[int]) -> Iterator[Local]:
    """Yield this rank's stretch of the gradients of parameters whose flat buffers are stepped now."""
    named: list[tuple[str, Any]] = [(weight.name, param) for param, weight in weights.items() if list(stand_ins(param))]
    buffers = {_memory_of(param): buffer for _, param in named if (buffer := _buffer_of(param)) is not None}
    for name, param in named:
        buffer = buffers.get(_memory_of(param))
        if marks(param):
            yield from _of_partition(name, param, stepped)
        elif buffer is not None and id(buffer) in stepped and buffer.grad is not None:
            yield from _stretch(name, param, buffer, buffer.grad)


def _memory_of(parameter: torch.Tensor) -> int:
    return parameter.untyped_storage().data_ptr()


def _buffer_of(parameter: Any) -> torch.Tensor | None:
    """Return the flat buffer that this rank's optimizer steps for some of a parameter's elements."""
    mapping = getattr(parameter, "_hp_mapping", None)
    buffer: torch.Tensor | None = None if mapping is None else mapping.hp_fragment._base
    return buffer


def _stretch(name: str, parameter: Any, buffer: torch.Tensor, grad: torch.Tensor) -> Iterator[Local]:
    """Yield this rank's stretch of a gradient: weights lie in a buffer of all ranks as gradients do in theirs."""
    shape, ranks = tuple(parameter.shape), tuple(distributed.get_process_group_ranks(parameter._dp_group))
    total = parameter.untyped_storage().nbytes() // parameter.element_size()
    offset, part = parameter.storage_offset(), buffer.numel()
    if part == total:
        yield Local(name, "grad", shape, grad[offset : offset + parameter.numel()].view(shape))
    elif part * len(ranks) == total:
        param = FlatParam.in_buffers(name, shape, ranks, grad, part, offset)
        flat = FlatRecord(shape, offset), total
        yield Local(name, "grad", shape, param.cut(grad), of_flat_param(param, None, "dp"), flat)
    else:
        why = f"its gradient: DeepSpeed has it in a buffer of {part:,} elements, its weight in one of {total:,}"
        yield not_understood(name, "grad", parameter, why)


def _of_partition(name: str, parameter: Any, stepped: Collection[int]) -> Iterator[Local]:
    """Yield this rank's part of the gradient of a partitioned parameter."""
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if optimizer is None or not parameter.requires_grad or _reason(parameter.ds_tensor):
        return
    group, at, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    buffer = optimizer.fp32_partitioned_groups_flat[group]
    if id(buffer) in stepped and buffer.grad is not None:
        local = of_tensor(name, "grad", parameter, None)
        assert local is not None
        yield replace(local, values=buffer.grad[at : at + local.values.numel()])


def _of_partitions(model: nn.Module) -> Iterator[Fragment]:
    """Yield this rank's fragments of the master copies and moments of partitioned parameters."""
    visited = set()
    for _, name, tensor in named_tensors(model):
        optimizer = getattr(tensor, "_z3_optimizer", None)
        if optimizer is not None and marks(tensor) and tensor.requires_grad and id(tensor) not in visited:
            visited.add(id(tensor))
            group, at, size = optimizer.grad_position[optimizer.get_param_id(tensor)]
            on_disk = optimizer.fp32_partitioned_groups_flat[group].numel() < at + size
            if not on_disk and not _reason(tensor.ds_tensor):  # type: ignore[attr-defined]
                yield _fragment(clean_name(name), tensor, optimizer)


def _fragment(name: str, param: Any, optimizer: Any) -> Fragment:
    """Describe a master copy: split evenly over the group and padded, like the weight."""
    ranks = tuple(distributed.get_process_group_ranks(param.ds_process_group))
    group, at, partition_size = optimizer.grad_position[optimizer.get_param_id(param)]
    start = ranks.index(distributed.get_rank()) * partition_size
    size = max(0, min(partition_size, param.ds_numel - start))
    flat = optimizer.fp32_partitioned_groups_flat[group]
    weight = param.ds_tensor.detach()[:size]
    buffers = {
        kind: state.detach().flatten()
        for kind, state in optimizer.optimizer.state.get(flat, {}).items()
        if hasattr(state, "numel") and state.numel() == flat.numel() > 1
    }
    values = flat.detach()[at : at + size]
    shape = tuple(int(size) for size in param.ds_shape)
    return Fragment(
        name,
        shape,
        ranks,
        min(start, param.ds_numel),
        values,
        weight,
        is_whole=len(ranks) == 1,
        offset=0,
        part=partition_size,
        states={kind: buffer[at : at + size] for kind, buffer in buffers.items()},
        buffer=int(group),
        buffers=buffers,
        group=param.ds_process_group,
    )


def _reason(held: Any) -> str:
    """Return why a partition cannot be read; empty if it can."""
    if hasattr(held, "ds_quant_scale"):
        return "its elements: DeepSpeed ZeRO-3 holds them quantized"
    if not held.numel() or held.ndim != 1:
        return "its elements: DeepSpeed ZeRO-3 has moved them to a disk"
    return ""


def _flat(name: str, shape: tuple[int, ...], tensor: Any, held: torch.Tensor) -> FlatParam:
    """Describe a partition as a flat parameter of its own."""
    ranks = tuple(distributed.get_process_group_ranks(tensor.ds_process_group))
    assert math.prod(shape) <= held.numel() * len(ranks)
    return FlatParam.in_buffers(name, shape, ranks, held.detach(), held.numel())


def _of_buffers(engine: nn.Module, model: nn.Module) -> Iterator[Fragment]:
    """Yield this rank's fragment of every parameter that DeepSpeed has linked to a flat buffer.

    Args:
        engine: The engine, whose optimizer has the moments; or the model itself.
    """
    states, visited = _states(engine), set()
    for role, name, tensor in named_tensors(model):
        if role == "param" and hasattr(tensor, "_hp_mapping") and id(tensor) not in visited:
            visited.add(id(tensor))
            yield _fragment_of_buffer(clean_name(name), tensor, states)


def _fragment_of_buffer(name: str, param: Any, of_buffers: Mapping[int, dict[str, torch.Tensor]]) -> Fragment:
    mapping, group = param._hp_mapping, param._dp_group
    ranks = tuple(distributed.get_process_group_ranks(group))
    shape, weight = tuple(param.shape), param.detach().flatten()
    if mapping is None:
        return Fragment(name, shape, ranks, 0, weight[:0].float(), weight, is_whole=True, group=group)
    address, at = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = mapping.hp_fragment._base
    partition_size = 0 if flat is None else flat.numel()
    offset = ranks.index(distributed.get_rank()) * partition_size + at.start - address.start if partition_size else None
    buffers = {
        kind: state.detach().flatten()
        for kind, state in of_buffers.get(id(flat), {}).items()
        if state.numel() == partition_size
    }
    values = mapping.hp_fragment.detach()
    return Fragment(
        name,
        shape,
        ranks,
        address.start,
        values,
        weight,
        is_whole=True,
        offset=offset,
        part=partition_size,
        states={kind: state[at.start : at.start + at.numel] for kind, state in buffers.items()},
        group=group,
        buffer=int(mapping.param_group_index),
        buffers=buffers,
    )


def _states(engine: nn.Module) -> dict[int, dict[str, torch.Tensor]]:
    """Return the states of each of an engine's flat buffers, by the buffer's identity.

    DeepSpeed itself links a fragment's states when the first buffer is stepped, and the later ones' are never linked.
    """
    optimizer = getattr(getattr(engine, "optimizer", None), "optimizer", None)
    groups = getattr(optimizer, "param_groups", ())
    return {
        id(flat): {
            kind: moment
            for kind, moment in getattr(optimizer, "state", {}).get(flat, {}).items()
            if hasattr(moment, "numel") and moment.ndim
        }
        for group in groups
        for flat in group["params"]
    }
