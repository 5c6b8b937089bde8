"""What assertions compare (modules, tensors, optimizers), on this rank and on all ranks.

To gather, each rank captures, and all exchange their records. Nothing is written to disk; the result is the `Dump` that
reading a dump would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors.numpy import load, save
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardviz.dump.dump import Dump, dump_of
from shardviz.dump.read import DumpFiles
from shardviz.dump.records.files import RankRecord
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout.mesh import Mesh
from shardviz.live.api import add_model
from shardviz.live.capture.agreement import of_all_ranks, refuse_without_group
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.pipeline_parts import agree
from shardviz.live.capture.stamp import Stamped, under_names
from shardviz.live.claims.registry import local_tensors, of_tensor, unwrapped
from shardviz.live.compat.meshes import root_mesh
from shardviz.live.step.step import gradients
from shardviz.live.step.steppers import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.base import Moment, Role
    from shardviz.live.claims.local import Local

Subject = nn.Module | torch.Tensor | Optimizer | Mapping[str, torch.Tensor]
UNNAMED = "tensor"
"""The name of a tensor that was passed without one."""

current_mesh: ContextVar[DeviceMesh | None] = ContextVar("current_mesh", default=None)
"""The mesh of the test that runs on this rank."""


def locals_of(subject: Subject, mesh: DeviceMesh | None, of: Collection[Role] = ("param", "buffer")) -> list[Local]:
    """Return this rank's tensors of a subject.

    Args:
        subject: A module's parameters and buffers and their gradients, an optimizer's state, or tensors.
        of: The roles of the tensors to return for a module.

    Raises:
        ShardvizError: The subject is of another type.
    """
    if isinstance(subject, nn.Module):
        locals_ = list(local_tensors(unwrapped(subject), plain_mesh(mesh) if mesh is not None else None))
        grads = gradients(locals_) if "grad" in of else []
        return [*(local for local in locals_ if local.role in of), *grads]
    role: Role = "optim" if isinstance(subject, Optimizer) else "activation"
    return [of_tensor(name, role, tensor) for name, tensor in _named(subject)]


def check_values(locals_: Iterable[Local]) -> None:
    """Check that tensors have values to compare.

    Raises:
        ShardvizError: A tensor is on the meta device.
    """
    for local in locals_:
        if local.values.is_meta:
            raise ShardvizError(
                f"{local.name} is on the meta device and has no values to compare",
                "materialize the model first: call to_empty, and draw or load its weights",
            )


def device_mesh_of(subject: Subject, device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the job's mesh: the given one, the test's, or a DTensor's; None without any."""
    job_mesh = device_mesh if device_mesh is not None else current_mesh.get()
    if job_mesh is not None:
        return job_mesh
    return next((root_mesh(tensor.device_mesh) for _, tensor in _named(subject) if isinstance(tensor, DTensor)), None)


def _named(subject: Subject) -> list[tuple[str, torch.Tensor]]:
    """Return a subject's tensors by name.

    Raises:
        ShardvizError: The subject is of another type.
    """
    if isinstance(subject, nn.Module):
        return list(subject.named_parameters())
    if isinstance(subject, torch.Tensor):
        return [(UNNAMED, subject)]
    if isinstance(subject, Optimizer):
        return list(_states(subject))
    if isinstance(subject, Mapping):
        return list(subject.items())
    raise ShardvizError(
        f"a {type(subject).__name__} has no tensors to check",
        "pass a module, a tensor, an optimizer, or tensors by name",
    )


def _states(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield an optimizer's state: by the name of its parameter if known, else by its number."""
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    parameters = list(parameters_of(optimizer))
    for number, parameter in enumerate(parameters):
        owner = names[number] if len(names) == len(parameters) else str(number)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{owner}.{key}", value


@dataclass(frozen=True)
class GatheredDump(DumpFiles):
    """A dump in memory, never written to disk.

    Attributes:
        arrays: Each rank's dense values, by rank and by `moment/role/name`.
    """

    arrays: dict[int, dict[str, NDArray[np.generic]]] = field(default_factory=dict)

    def dense(self, rank: int, key: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Return one array of a rank.

        Raises:
            DumpError: The rank sent no such array, or its shape is different.
        """
        array = self.arrays.get(rank, {}).get(key)
        if array is None or array.shape != shape:
            raise DumpError(f"rank {rank} sent no values of {key!r} in shape {list(shape)}")
        return array


def gather_ids(model: nn.Module, mesh: DeviceMesh | None, stamps: Stamped, stage_axes: Sequence[str]) -> Dump:
    """Return the ids that all ranks hold of a stamped model. Every rank of the job calls this.

    Args:
        mesh: The mesh of the job; by default all ranks in a row.

    Raises:
        MeshError: The mesh has no such axis.
        ShardvizError: No process group is initialized, or ranks of one stage stamped different tensors.
    """
    refuse_without_group("mark the test with @spmd(mesh=...), or pass the folder of a dump")
    inner = unwrapped(model)
    names = [local.name for local in local_tensors(inner)]
    stamps = stamps if stage_axes else under_names(stamps, names)
    pipeline_part = agree(_job_mesh(mesh), stage_axes, stamps.stamps, names)
    return gather(lambda seen: add_model(seen, inner, mesh, stamps, pipeline_part), mesh, Stamped(pipeline_part.stamps))


def gather_values(locals_: Iterable[Local], mesh: DeviceMesh | None, moment: Moment = "step") -> Dump:
    """Return the values that all ranks hold of tensors; at the step, whole. Every rank calls this."""

    def add(capture: Capture) -> None:
        for local in locals_:
            capture.add_values(local, moment)

    return gather(add, mesh)


def gather(
    add: Callable[[Capture], object], mesh: DeviceMesh | None, stamps: Stamped | None = None, reference: str = ""
) -> Dump:
    """Capture tensors on every rank and return those of all ranks. Every rank calls this.

    Args:
        add: Captures this rank's tensors.
        mesh: The mesh of the job; by default all ranks in a row.
        reference: What values were compared with, in words, if that is what ids stand for.

    Raises:
        ShardvizError: No process group is initialized.
    """
    refuse_without_group("mark the test with @spmd(mesh=...), or pass the folder of a dump")
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    capture = Capture(rank, num_ranks, {stamp.name: stamp for stamp in stamps.stamps} if stamps else {})
    if mesh is not None:
        capture.add_mesh(mesh)
    add(capture)
    sent = of_all_ranks((msgspec.json.encode(capture.record()), save(capture.dense) if capture.dense else b""))
    records = map(partial(msgspec.json.decode, type=RankRecord), (record for record, _ in sent))
    arrays = {at: load(dense) for at, (_, dense) in enumerate(sent) if dense}
    run = run_record(num_ranks, _job_mesh(mesh), reference=reference, stamps=stamps.stamps if stamps else ())
    return dump_of(GatheredDump(Path("this job"), run, dict(enumerate(records)), arrays=arrays))


def _job_mesh(mesh: DeviceMesh | None) -> Mesh:
    return plain_mesh(mesh) if mesh is not None else Mesh(("rank",), (distributed.get_world_size(),))
