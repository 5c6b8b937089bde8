"""Capture one model of a running job, with whatever its values can be compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from shardviz.dump.dump import ID_NONE
from shardviz.errors import MeshError, ShardvizError
from shardviz.live.api import capture_by_reference
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.by_reference import opened
from shardviz.live.capture.found_mesh import found_mesh
from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.pipeline_parts import PipelinePart
from shardviz.live.capture.stamp import bits_of_tensor
from shardviz.live.compat import DTensor
from shardviz.live.run.meeting import meet
from shardviz.live.run.notes import Note, leave
from shardviz.live.run.values import UNSEEN
from shardviz.reference.files import Reference
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from shardviz.live.claims.local import Local
    from shardviz.live.run.options import Options
    from shardviz.live.run.sources import Source
    from shardviz.live.run.values import Kept, Values

WRITTEN = "its values were written after it was sharded: no rank holds any of the values from before"
AGAIN = "every rank computed it again after it was sharded, with equal results"
DIFFERED = "ranks had different values before it was sharded"

FEW = 0.1
"""The part of a tensor's elements that may be found in its old values by chance."""


class Seen(Protocol):
    """What was seen of a job so far.

    Attributes:
        options: What is asked for.
        values: The values that modules had before they were sharded.
        sources: What values may be compared with, the newest last.
    """

    options: Options
    values: Values
    sources: list[Source]


@dataclass(frozen=True, slots=True)
class Stage:
    """The place of a pipeline's stage.

    Attributes:
        number: Which of its rank's stages it is.
        group: The process group of the ranks that have the others.
    """

    number: int
    group: Any


_TIMES: Counter[str] = Counter()


def take(seen: Seen, root: nn.Module, folder: Path | None = None, stage: Stage | None = None) -> Note:
    """Capture a model, if every rank comes to it.

    Args:
        seen: What was seen of the job.
        root: The model, or this rank's stage of a pipeline.
        folder: Where to; by default where the options say, with a number for each model of the job.
        stage: The place of the stage, if it is one.

    Returns:
        The dump, or what kept the model from being captured: that is not raised in somebody's job.
    """
    name = f"stage {stage.number} of a pipeline" if stage else name_of(root)
    what = f"{folder or ''}/{name}"
    _TIMES[what] += 1
    meeting = meet(f"{what}/{_TIMES[what]}", seen.options.patience)
    rank = distributed.get_rank()
    if meeting.number < 0:
        late = f"{_ranks(meeting.missing)} did not call it" if meeting.missing else "the ranks did not call it together"
        return Note("not-captured", rank, f"{name}: {late} within {seen.options.patience:g} s")
    folder = folder or seen.options.dump(meeting.number)
    try:
        with torch.no_grad():
            source = _capture(seen, root, folder, stage)
    except ShardvizError as error:
        return Note("not-captured", rank, f"{name}: {error.message}\n{error.hint}")
    if source.entries and rank == 0:
        leave(seen.options.session, Note("source", 0, f"values of {name} are compared with {source.path}"))
    return Note("captured", rank, str(folder))


def name_of(root: nn.Module) -> str:
    """Return the name of a model's class as its author wrote it.

    `fully_shard` derives a class of its own from it, `(FSDPModule, cls)` in torch 2.4.1 to 2.13.0.
    """
    kind = type(unwrapped(root))
    bases = kind.__bases__
    return bases[1].__name__ if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else kind.__name__


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, 4)}"


def _capture(seen: Seen, root: nn.Module, folder: Path, stage: Stage | None) -> Reference:
    """Write the dump, and return what values were compared with."""
    mesh = _mesh_of(root, stage)
    part = PipelinePart(_axes_of(mesh, stage) if stage else ())
    options, sift = seen.options, None
    if options.reference:
        source = opened(options.reference)
    else:
        locals_ = list(part.own(local_tensors(unwrapped(root), plain_mesh(mesh))))
        names = [local.name for local in locals_]
        source, snapshots = _remembered(seen, root, names)
        sift = Sifting(seen.values.kept(unwrapped(root)), snapshots, _equal_buffers(locals_))
    capture_by_reference(
        root,
        folder,
        mesh,
        (source, options.names),
        part,
        force=options.force,
        sift=sift,
        command=options.command,
    )
    return source


def _mesh_of(root: nn.Module, stage: Stage | None) -> DeviceMesh:
    """Return the mesh of the model's DTensors; all ranks along one axis where no rank has any, as under DDP."""
    try:
        return found_mesh(root)
    except MeshError:
        if any(of_all_ranks(_has_claims(root))):
            raise
        return _whole_job(root, "pp" if stage else "dp")


def _has_claims(root: nn.Module) -> bool:
    return any(isinstance(one, DTensor) for one in (*root.parameters(), *root.buffers()))


def _whole_job(root: nn.Module, axis: str) -> DeviceMesh:
    """Return all ranks along one axis: the mesh of a job that has none, DistributedDataParallel's for one."""
    assert distributed.group.WORLD is not None
    device = next((tensor.device.type for tensor in (*root.parameters(), *root.buffers())), "cpu")
    return DeviceMesh.from_group(distributed.group.WORLD, device, mesh_dim_names=(axis,))


def _axes_of(mesh: DeviceMesh, stage: Stage) -> tuple[str, ...]:
    """Return the axis of a mesh along which a pipeline's stages lie."""
    ranks = distributed.get_process_group_ranks(stage.group)
    for axis, name in enumerate(plain_mesh(mesh).axes):
        if distributed.get_process_group_ranks(mesh.get_group(axis)) == ranks:
            return (name,)
    raise MeshError(
        f"the mesh of the model's tensors, {plain_mesh(mesh)}, has no axis along which the pipeline's stages are: "
        f"ranks {listed(ranks, 4)}",
        "make one mesh of the whole job, with an axis for the pipeline",
    )


def _remembered(seen: Seen, root: nn.Module, names: list[str]) -> tuple[Reference, frozenset[str]]:
    """Return what is known of a model's values, the newest that any rank has, and which of it is a snapshot."""
    model = unwrapped(root)
    mine: dict[str, Any] = {}
    for source in seen.sources:
        mine |= {name: (entry, source.is_snapshot, source.path) for name, entry in source.entries(model, names).items()}
    kept = seen.values.kept(model)
    why = {name: kept[name].why or UNSEEN if name in kept else UNSEEN for name in names if name not in mine}
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for of_rank, not_here in of_all_ranks((mine, why)):
        found = of_rank | found
        reasons = not_here | reasons
    paths = sorted({path for _, _, path in found.values()}, key=str)
    path = paths[0] if len(paths) == 1 else Path(" and ".join(one.name for one in paths) or "nothing")
    entries = {name: entry for name, (entry, _, _) in found.items()}
    reference = Reference(path, entries, {name: text for name, text in reasons.items() if name not in entries})
    return reference, frozenset(name for name, (_, is_snapshot, _) in found.items() if is_snapshot)


class Sifting:
    """Leaves out what a job rightly changed between the sharding and the capture: re-initialised weights, say.

    A tensor of which no rank holds any old value was written since, and nothing is known of it. If some ranks hold old
    values and others do not, that is a finding, unless they had different ones from the start. Buffers that have other
    values than before, the same on every rank, were computed again.
    """

    def __init__(self, kept: Mapping[str, Kept], snapshots: frozenset[str], equal: Collection[str] = ()) -> None:
        self._equal = equal
        self._samples = {name: one.sample for name, one in kept.items()}
        self._snapshots = snapshots

    def __call__(self, places: Mapping[str, NDArray[np.int64] | None]) -> dict[str, str]:
        """Return which of this job's tensors are not to be checked, and why. Every rank calls this."""
        mine = {name: _is_found(ids) for name, ids in places.items() if name in self._snapshots}
        of_all = of_all_ranks((mine, self._samples))
        changed = (name for name, ids in places.items() if ids is not None and name in self._snapshots)
        not_known = dict.fromkeys((name for name in changed if name in self._equal), AGAIN)
        for name in sorted({name for found, _ in of_all for name in found}):
            of_ranks = [(found[name], samples.get(name)) for found, samples in of_all if name in found]
            first = next((samples[name] for _, samples in of_all if samples.get(name) is not None), None)
            if name in not_known:
                continue
            if not any(found for found, _ in of_ranks):
                not_known[name] = WRITTEN
            elif not all(found or sample in (None, first) for found, sample in of_ranks):
                not_known[name] = DIFFERED
        return not_known


def _is_found(ids: NDArray[np.int64] | None) -> bool:
    """Whether a shard has any of its tensor's old values."""
    return ids is None or bool(np.mean((ids != ID_NONE) & (ids != 0)) > FEW)


def _equal_buffers(locals_: Iterable[Local]) -> frozenset[str]:
    """Return the buffers without a claim that are bitwise the same on every rank. Every rank calls this."""
    sums = {
        local.name: crc32(bits_of_tensor(local.values).tobytes())
        for local in locals_
        if local.role == "buffer" and local.claim is None and not local.values.is_meta
    }
    first, *others = of_all_ranks(sums)
    return frozenset(name for name, own in first.items() if all(other.get(name) == own for other in others))
