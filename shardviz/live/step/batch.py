"""The batch of a step: the axes over which it is split, and this rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.compat.meshes import local_of
from shardviz.live.step.running import tensors_in
from shardviz.relate.tolerance import SINGLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh

Batch = tuple[Any, ...]

DATA_AXES = ("dp", "ddp", "data", "fsdp", "hsdp", "replicate", "shard")
"""Prefixes of the names of mesh axes over which training splits its batch."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step runs on.

    Attributes:
        build: Builds the unsharded model, with the values from which the sharded one starts.
        axes: The axes over which the batch is split, with the dims that they split.
        batch: The whole batch.
        parts: The number of equal parts of its rows.
        dim: The dim that has the rows.
    """

    build: Callable[[], nn.Module]
    axes: Mapping[str, int]
    batch: Batch
    parts: int
    dim: int


def batch_axes(probe: ModuleType, mesh: Mesh) -> dict[str, int]:
    """Return the axes over which the batch is split, outermost first, each with the dim that it splits.

    Raises:
        MeshError: The mesh has no such axis.
        ProbeError: A dim is not a whole number from 0.
    """
    named = getattr(probe, "BATCH_AXES", ())
    axes = dict(named) if isinstance(named, Mapping) else dict.fromkeys(named, 0)
    for axis, dim in axes.items():
        mesh.axis_index(axis)
        if type(dim) is not int or dim < 0:
            raise ProbeError(
                f"BATCH_AXES splits dim {dim!r} over {axis}", "count dims from 0: BATCH_AXES = {'dp': 0, 'cp': 1}"
            )
    return axes


def whole_batch(probe: ModuleType, axes: Mapping[str, int], mesh: Mesh, *, double: bool = True) -> Batch:
    """Return the probe's batch, in float64 or as it is, the same on every rank.

    What is beyond a multiple of a dim's parts is dropped: a mean over unequal parts is not the mean of the whole.

    Raises:
        ProbeError: There are fewer rows than parts.
    """
    torch.manual_seed(1)
    batch = probe.batch()
    if batch is None:
        raise ProbeError("batch() returned None", "return a tensor, or a tuple or dict of the model's arguments")
    return whole_parts(tuple(batch) if isinstance(batch, tuple | list) else (batch,), axes, mesh, double=double)


def whole_parts(batch: Batch, axes: Mapping[str, int], mesh: Mesh, *, double: bool = False) -> Batch:
    """Return a batch without what is beyond a multiple of a dim's parts.

    Raises:
        ProbeError: There are fewer rows than parts.
    """
    counts = num_parts(axes, mesh)
    return tuple(each(part, lambda tensor: _whole(tensor, counts, double=double)) for part in batch)


def num_parts(axes: Mapping[str, int], mesh: Mesh) -> dict[int, int]:
    """Return the number of parts of every dim that axes split."""
    counts: dict[int, int] = {}
    for axis, dim in axes.items():
        counts[dim] = counts.get(dim, 1) * mesh.axis_size(axis)
    return counts


def row_axes(axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes that share out whole rows; others split rows, as for a sequence.

    These are the axes of dim 0; if there are none, those that are named like data parallelism.
    """
    by_name = [dim for axis, dim in axes.items() if axis.startswith(DATA_AXES)]
    dim = 0 if 0 in axes.values() or not by_name else by_name[0]
    return tuple(axis for axis in axes if axes[axis] == dim)


def each(batch_part: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a part of a batch with every tensor in it changed, also inside a dict."""
    if isinstance(batch_part, Mapping):
        return {key: each(value, change) for key, value in batch_part.items()}
    return change(batch_part) if torch.is_tensor(batch_part) else batch_part


def _whole(tensor: torch.Tensor, counts: Mapping[int, int], *, double: bool) -> torch.Tensor:
    for dim, parts in counts.items():
        if has_dim(tensor, dim):
            size = tensor.shape[dim]
            if size < parts:
                rows = "row" if dim == 0 else f"element in dim {dim}"
                many = rows.replace("row", "rows").replace("element", "elements")
                raise ProbeError(
                    f"the batch has {size} {rows if size == 1 else many} for {parts} ranks",
                    f"return at least {parts} {many}",
                )
            tensor = tensor.narrow(dim, 0, size // parts * parts)
    return tensor.double() if double and tensor.is_floating_point() else tensor


def has_dim(tensor: torch.Tensor, dim: int) -> bool:
    """Whether a tensor of a batch is split along a dim: one that lacks it, or that is broadcast along it, is not."""
    return tensor.ndim > dim and (dim == 0 or tensor.shape[dim] > 1)


def axes_of_one_batch(probe: ModuleType, mesh: Mesh, outputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Return axes named like data parallelism whose ranks saw the same batch. Every rank calls this.

    Ranks that see the same batch have the same gradients, reduced or not, so a missing reduction would not show.
    Without BATCH_AXES every rank is given the whole batch. A step of its own may still cut it: outputs then differ.

    Args:
        probe: The probe.
        mesh: The run's mesh.
        outputs: What the model returned on this rank, run by run.
    """
    if hasattr(probe, "BATCH_AXES"):
        return ()
    axes = tuple(axis for axis in mesh.long_axes if axis.startswith(DATA_AXES))
    if not axes:
        return ()
    norms = of_all_ranks([float(torch.linalg.vector_norm(local_of(output).abs().double())) for output in outputs])
    groups = {axis: [[norms[rank] for rank in group] for group in mesh.groups(axis)] for axis in axes}
    return tuple(axis for axis in axes if all(map(_are_equal, groups[axis])))


def _are_equal(norms: Sequence[Sequence[float]]) -> bool:
    """Whether ranks that ran the model alike have outputs of the same norms."""
    return all(
        abs(left - right) <= SINGLE * max(abs(left), abs(right))
        for of_run in zip(*norms, strict=False)
        for left, right in pairwise(of_run)
    )


def own_batch(batch: Batch, axes: Mapping[str, int], mesh: DeviceMesh) -> Batch:
    """Return this rank's part of the batch: in each dim that of its coordinate on the dim's axes, outermost first.

    It is on the device of the mesh.
    """
    for dim in dict.fromkeys(axes.values()):
        parts, position = 1, 0
        for axis in (axis for axis in axes if axes[axis] == dim):
            size = mesh[axis].size()
            parts, position = parts * size, position * size + mesh.get_local_rank(axis)
        batch = part_of(batch, position, parts, dim)
    return tuple(each(element, lambda tensor: tensor.to(mesh.device_type)) for element in batch)


def part_of(batch: Batch, number: int, parts: int, dim: int = 0) -> Batch:
    """Return one of several equal parts of a batch, by default of its rows."""
    return tuple(
        each(element, lambda tensor: tensor.chunk(parts, dim)[number] if has_dim(tensor, dim) else tensor)
        for element in batch
    )


def in_turns(batch: Batch, parts: int, turns: int) -> Batch | None:
    """Reorder a batch's rows: each of its micro-batches then has the same micro-batch of every part.

    Args:
        batch: The batch.
        parts: The number of equal parts of its rows.
        turns: How many micro-batches the batch is cut into, and each part.

    Returns:
        The batch; None if a micro-batch of a part has no whole number of rows.
    """
    sizes = [len(tensor) for tensor in tensors_in(batch) if tensor.ndim]
    if turns > 1 and any(size % (parts * turns) for size in sizes):
        return None

    def dealt(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        return tensor.reshape(parts, turns, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)

    return tuple(each(element, dealt) for element in batch) if turns > 1 else batch


def as_written(batch: Batch) -> Any:
    """Return a batch as the probe wrote it: a batch of one tensor is passed as that tensor."""
    return batch[0] if len(batch) == 1 else batch
