"""Capture one model of a running job, with whatever its values can be compared with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from shardviz.dump.dump import ID_NONE
from shardviz.errors import MeshError, ShardvizError
from shardviz.live.api import capture_by_reference
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.found_mesh import found_mesh
from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.pipeline_parts import PipelinePart
from shardviz.live.run.meeting import meet
from shardviz.live.run.notes import Note, leave
from shardviz.live.run.values import UNSEEN
from shardviz.reference.files import Reference, open_reference
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.live.run.observer import Observer

WRITTEN = "its values were written after it was sharded: no rank holds any of the values from before"
DIFFERED = "ranks had different values before it was sharded"

FEW = 0.1
"""The part of a tensor's elements that may be found in its old values by chance."""

_TIMES: Counter[str] = Counter()


def take(seen: Observer, root: nn.Module, stage: int | None = None, group: Any = None) -> None:
    """Capture a model, if every rank comes to it. What keeps it from being captured is noted, not raised.

    Args:
        seen: What was seen of the job.
        root: The model, or this rank's stage of a pipeline.
        stage: Which of this rank's stages it is, if it is one.
        group: The process group of the ranks that have the other stages.
    """
    what = f"stage {stage} of a pipeline" if stage is not None else type(unwrapped(root)).__name__
    _TIMES[what] += 1
    meeting = meet(f"{what}/{_TIMES[what]}", seen.options.patience)
    rank = distributed.get_rank()
    if meeting.number < 0:
        late = f"ranks {listed(meeting.missing, 4)}" if meeting.missing else "some ranks"
        text = f"{what}: {late} did not come to it within {seen.options.patience:g} s"
        leave(seen.options.session, Note("not-captured", rank, text))
        return
    folder = seen.options.dump(meeting.number)
    try:
        with torch.no_grad():
            _capture(seen, root, folder, group)
    except ShardvizError as error:
        text = f"{what}: {error.message}"
        leave(seen.options.session, Note("not-captured", rank, f"{text}\n{error.hint}"))
        return
    leave(seen.options.session, Note("captured", rank, str(folder)))


def _capture(seen: Observer, root: nn.Module, folder: Path, group: Any) -> None:
    try:
        mesh = found_mesh(root)
    except MeshError:
        if of_all_ranks(_has_claims(root)).count(True):
            raise
        mesh = _whole_job(root, "pp" if group is not None else "dp")
    axes = _axes_of(mesh, group) if group is not None else ()
    part = PipelinePart(axes)
    options = seen.options
    if options.reference:
        source = open_reference(options.reference), options.names
        sift = None
    else:
        source, snapshots = _remembered(seen, root, [local.name for local in local_tensors(unwrapped(root))])
        sift = Sifting(seen.values.kept(unwrapped(root)), snapshots)
    _say_source(seen, root, source[0])
    capture_by_reference(
        root, folder, mesh, source, part, force=options.force, sift=sift, command=options.command
    )


def _say_source(seen: Observer, root: nn.Module, reference: Reference) -> None:
    if reference.entries and distributed.get_rank() == 0:
        text = f"{type(unwrapped(root)).__name__}: values are compared with {reference.path}"
        leave(seen.options.session, Note("source", 0, text))


def _has_claims(root: nn.Module) -> bool:
    from shardviz.live.compat import DTensor

    return any(isinstance(one, DTensor) for one in (*root.parameters(), *root.buffers()))


def _whole_job(root: nn.Module, axis: str) -> DeviceMesh:
    """Return all ranks along one axis: the mesh of a job that has none, DistributedDataParallel's for one."""
    device = next((tensor.device.type for tensor in (*root.parameters(), *root.buffers())), "cpu")
    return DeviceMesh.from_group(distributed.group.WORLD, device, mesh_dim_names=(axis,))


def _axes_of(mesh: DeviceMesh, group: Any) -> tuple[str, ...]:
    """Return the axis of a mesh along which a pipeline's stages lie."""
    ranks = distributed.get_process_group_ranks(group)
    for axis, name in enumerate(plain_mesh(mesh).axes):
        if distributed.get_process_group_ranks(mesh.get_group(axis)) == ranks:
            return (name,)
    raise MeshError(
        f"the mesh of the model's tensors, {plain_mesh(mesh)}, has no axis along which the pipeline's stages are: "
        f"ranks {listed(ranks, 4)}",
        "make one mesh of the whole job, with an axis for the pipeline",
    )


def _remembered(
    seen: Observer, root: nn.Module, names: list[str]
) -> tuple[tuple[Reference, dict[str, str]], frozenset[str]]:
    """Return what is known of a model's values, the newest that any rank has, and which of it is a snapshot."""
    model = unwrapped(root)
    mine: dict[str, Any] = {}
    for source in seen.sources:
        mine |= {
            name: (entry, source.is_snapshot, source.path) for name, entry in source.entries(model, names).items()
        }
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
    return (reference, {}), frozenset(name for name, (_, is_snapshot, _) in found.items() if is_snapshot)


class Sifting:
    """Leaves out what a job rightly changed between the sharding and the capture: re-initialised weights, say.

    A tensor of which no rank holds any old value was written since, and nothing is known of it. If some ranks hold old
    values and others do not, that is a finding, unless they had different ones from the start.
    """

    def __init__(self, kept: Mapping[str, Any], snapshots: frozenset[str]) -> None:
        self._samples = {name: one.sample for name, one in kept.items()}
        self._snapshots = snapshots

    def __call__(self, places: Mapping[str, NDArray[np.int64] | None]) -> dict[str, str]:
        """Return which of this job's tensors are not to be checked, and why. Every rank calls this."""
        mine = {name: _is_found(ids) for name, ids in places.items() if name in self._snapshots}
        of_all = of_all_ranks((mine, self._samples))
        not_known: dict[str, str] = {}
        for name in sorted({name for found, _ in of_all for name in found}):
            of_ranks = [(found[name], samples.get(name)) for found, samples in of_all if name in found]
            first = next((samples[name] for _, samples in of_all if samples.get(name) is not None), None)
            if not any(found for found, _ in of_ranks):
                not_known[name] = WRITTEN
            elif not all(found or sample in (None, first) for found, sample in of_ranks):
                not_known[name] = DIFFERED
        return not_known


def _is_found(ids: NDArray[np.int64] | None) -> bool:
    """Whether a shard has any of its tensor's old values."""
    return ids is None or not ids.size or bool(np.mean((ids != ID_NONE) & (ids != 0)) > FEW)


