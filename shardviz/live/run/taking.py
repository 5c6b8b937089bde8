"""Capture one model of a running job, with whatever its values can be compared with.

Stages of a pipeline that share a name with a number in it count from the same number, so that all but one of them have
layers that a whole model numbers otherwise. Which ones those are is not known: they are told apart, and compared with
nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardviz.errors import MeshError, ShardvizError
from shardviz.live.api import capture_by_reference
from shardviz.live.capture.agreement import in_a_line, of_all_ranks, together
from shardviz.live.capture.idle_axes import found_mesh
from shardviz.live.capture.lookup.by_reference import ComparedWith, opened
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.pipeline_parts import PipelinePart
from shardviz.live.claims.registry import local_tensors, name_of, unwrapped
from shardviz.live.run.hooks.observing import show_traceback
from shardviz.live.run.meeting import meet_again
from shardviz.live.run.options import Note
from shardviz.live.run.references.changes import sifting
from shardviz.live.run.references.choosing import chosen
from shardviz.live.run.references.moments import with_moments
from shardviz.text import cut_at_number, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from shardviz.live.claims.local import Local
    from shardviz.live.run.session import Session
    from shardviz.reference.files import Reference


@dataclass(frozen=True, slots=True)
class Stage:
    """The place of a pipeline's stage.

    Attributes:
        number: Which of its rank's stages it is.
        group: The process group of the ranks that have the others.
    """

    number: int
    group: Any


def take(session: Session, root: nn.Module, folder: Path | None = None, stage: Stage | None = None) -> Note:
    """Capture a model, if every rank comes to it.

    Args:
        folder: Where to; by default where the options say, with a number for each model of the job.

    Returns:
        The dump, or what kept the model from being captured: that is not raised in somebody's job.
    """
    name = f"stage {stage.number} of a pipeline" if stage else name_of(root)
    missing = meet_again(f"{folder or ''}/{name}", session.options.patience)
    if missing is not None:
        late = f"{named_ranks(missing, 4)} did not call it" if missing else "the ranks did not call it together"
        return Note("not-captured", distributed.get_rank(), f"{name}: {late} within {session.options.patience:g} s")
    return _take(session, root, name, folder or session.options.dump(len(session.dumps)), stage)


def _take(session: Session, root: nn.Module, name: str, folder: Path, stage: Stage | None) -> Note:
    """Capture a model to which all ranks have come; if any of them cannot, none does."""
    rank = distributed.get_rank()
    try:
        with torch.no_grad(), together():
            source = _capture(session, root, folder, stage)
    except ShardvizError as error:
        return Note("not-captured", rank, f"{name}: {error.message}\n{error.hint}")
    except Exception as error:
        show_traceback()
        return Note("not-captured", rank, f"{name}: rank {rank} failed: {in_a_line(error)}\n")
    session.dumps.append(folder)
    if source.entries and rank == 0:
        session.leave("source", f"values of {name} are compared with {source.path}")
    return Note("captured", rank, str(folder))


def _capture(session: Session, root: nn.Module, folder: Path, stage: Stage | None) -> Reference:
    """Write the dump, and return what values were compared with."""
    mesh = _mesh_of(root, stage)
    pipeline_part = PipelinePart(_axes_of(mesh, stage) if stage else ())
    locals_ = list(pipeline_part.of_stage(local_tensors(unwrapped(root), plain_mesh(mesh))))
    source = replace(
        _reference_of_job(session, unwrapped(root), locals_),
        unwritten=session.unwritten.names(unwrapped(root)),
        replaced=tuple(session.values.replaced(unwrapped(root))),
    )
    names = [local.name for local in locals_]
    if stage and (apart := told_apart(pipeline_part, stage.group, names)).prefix:
        pipeline_part = apart
        source = replace(source, reference=without_layers(source.reference, apart, names), moments=())
    options = session.options
    capture_by_reference(root, folder, mesh, source, pipeline_part, force=options.force, command=options.command)
    return source.reference


def _reference_of_job(session: Session, model: nn.Module, locals_: list[Local]) -> ComparedWith:
    """Return the job's reference: the one asked for, or the values seen."""
    names, tied = session.options.names, tuple(session.values.tied(model))
    if session.options.reference:
        return ComparedWith(opened(session.options.reference), names, tied=tied)
    kept_values = session.values.kept(model)
    chosen_sources = chosen(session.options.session, session.sources, model, locals_, kept_values, session.skipped)
    chosen_sources, moments = with_moments(chosen_sources, session.sources, model, locals_)
    sift = sifting(kept_values, chosen_sources, locals_, moments)
    skipped = session.skipped | {name: name for name in chosen_sources.lost}
    return ComparedWith(
        chosen_sources.reference, names, sift, chosen_sources.notes, tied, skipped=skipped, moments=moments
    )


def _mesh_of(root: nn.Module, stage: Stage | None) -> DeviceMesh:
    """Return the mesh of the model's DTensors; without any, as under DDP, a single axis."""
    try:
        return found_mesh(root)
    except MeshError:
        if any(
            of_all_ranks(any(isinstance(tensor, DTensor) for tensor in (*root.parameters(), *nn.Module.buffers(root))))
        ):
            raise
        return _whole_job(root, stage)


def _whole_job(root: nn.Module, stage: Stage | None) -> DeviceMesh:
    """Return a mesh with all ranks along one axis: `ddp` under DistributedDataParallel, `pp` for stages, or `world`.

    Raises:
        MeshError: It averages over some of the ranks, and nothing says how the others relate to them.
    """
    assert distributed.group.WORLD is not None
    num_ranks = distributed.get_world_size()
    sizes = [module.process_group.size() for module in root.modules() if isinstance(module, DistributedDataParallel)]
    over = min(sizes, default=num_ranks)
    if over < num_ranks:
        raise MeshError(
            f"DistributedDataParallel averages over {over:,} of {num_ranks:,} ranks, and the model has no DTensor: "
            f"nothing says whether the others have copies or other parts",
            "make what is split a DTensor (DTensor.from_local with its placements), or shard it by parallelize_module",
        )
    device = next((tensor.device.type for tensor in (*root.parameters(), *nn.Module.buffers(root))), "cpu")
    return DeviceMesh.from_group(
        distributed.group.WORLD, device, mesh_dim_names=("pp" if stage else "ddp" if sizes else "world",)
    )


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


NUMBERED = (
    "stages number their layers for themselves, and a checkpoint's layer of this number may be another stage's; give "
    "each layer the number that it has in the whole model, and it is compared"
)


def told_apart(pipeline_part: PipelinePart, group: Any, names: Iterable[str]) -> PipelinePart:
    """Put a stage's coordinate before names that stages share. Every rank calls this.

    Args:
        group: The process group of the ranks that have the other stages.
    """
    numbered_here = {name for name in names if any(word.isdigit() for word in name.split("."))}
    ranks = tuple(distributed.get_process_group_ranks(group))
    of_group = [numbered for of, numbered in of_all_ranks((ranks, numbered_here)) if of == ranks]
    if not _number_for_themselves(of_group):
        return pipeline_part
    return replace(pipeline_part, prefix=f"{pipeline_part.axes[0]}={distributed.get_rank(group)}.")


def _number_for_themselves(stages: Sequence[Collection[str]]) -> bool:
    """Whether stages share names because each counts its layers from one number; else they have a layer in common."""
    uses = Counter(name for names in stages for name in names)
    cuts = [[cut_at_number(name) for name in names] for names in stages]
    for stem in {cut_at_number(name)[0] for name, count in uses.items() if count > 1}:
        numbers = [[number for before, number, _ in cut if before == stem and number is not None] for cut in cuts]
        if len({min(of_stage) for of_stage in numbers if of_stage}) == 1:
            return True
    return False


def without_layers(reference: Reference, pipeline_part: PipelinePart, names: Iterable[str]) -> Reference:
    """Return an empty reference for stages that number their layers. Every rank calls this."""
    of_all = of_all_ranks([pipeline_part.prefix + name for name in names])
    return replace(reference, entries={}, why={name: NUMBERED for of_rank in of_all for name in of_rank})
