"""The functions for users' jobs: capture every rank's tensors, and what a job's own training step gave.

There is no unsharded model beside such a step, so that only copies can be compared: of gradients along axes that do not
split them, and of logged numbers over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from shardviz.errors import ShardvizError
from shardviz.layout.placements import Replicate
from shardviz.live.capture.agreement import refuse_without_group
from shardviz.live.capture.describe import rounded_copies
from shardviz.live.capture.idle_axes import found_mesh, idle_axes, notes_on
from shardviz.live.capture.lookup.by_reference import (
    ComparedWith,
    add_by_reference,
    as_copies,
    known_in,
    opened,
    wanted_of,
)
from shardviz.live.capture.lookup.masters import add_masters
from shardviz.live.capture.lookup.merges import with_merged
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.passes import Sharding, add_ids, capture_passes
from shardviz.live.capture.pipeline_parts import PipelinePart, agree
from shardviz.live.capture.stamp import Stamped, plan, tied_names, under_names
from shardviz.live.claims import registry
from shardviz.live.claims.local import Local, as_part
from shardviz.live.claims.registry import local_tensors, of_tensor, unwrapped
from shardviz.live.compat.modules import computed_buffers
from shardviz.live.dumping import dump_of_job
from shardviz.live.world.group import kept_random_states
from shardviz.text import did_you_mean

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.capture import Capture

CAST = "cast the model before shardviz.stamp, which fills it with what its dtype can hold, not afterwards"


def capture(
    model: nn.Module,
    path: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    stamps: Stamped | None = None,
    reference: str | Path | None = None,
    reference_names: Mapping[str, str] | None = None,
    step: Mapping[str, Any] | None = None,
    stage_axes: Sequence[str] = (),
    intended: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Write a dump of the tensors that every rank holds of a model. Every rank calls this.

    Args:
        model: The sharded model; in a pipeline, this rank's stage.
        path: The dump's folder, the same on every rank. Machines that share no disk keep the files of their own ranks;
            `shardviz gather` puts them together.
        mesh: The mesh of the whole job; without it, the one that the model's DTensors are on.
        stamps: What `shardviz.stamp` returned before the model was sharded.
        reference: A safetensors file, or a folder of them, with the weights that the model was loaded from. Values are
            looked up in it, so that no weight has to be stamped; each rank reads the slices that it claims. Without
            stamps and without a reference only copies can be compared.
        reference_names: The reference's names if they are not the model's, by pattern over the model's:
            `{"layers.*.wq.weight": "model.layers.*.self_attn.q_proj.weight"}`; or what a tensor is made of, as in the
            lines of a map: `{"layers.*.gate_up": "cat(layers.*.w1, layers.*.w3, 0)"}`.
        step: What the job's own step gave, after backward and before the optimizer: `{"loss": loss, "output": output,
            "log": {"grad_norm": norm}}`, all of it optional. The model's gradients are written with it. Copies of
            gradients must agree between ranks, and what is logged must be the same on all of them.
        stage_axes: The mesh axes along which ranks have different layers: `("pp",)`. A stage may be cut from a model
            that was stamped whole, or be built and stamped by itself.
        intended: The layouts that you want, in the notation, by pattern over names: `[*/tp, *]`; with the order of a
            dim that is reordered on purpose, `[*/tp, *] order 0: 2 0 3 1`. Patterns that fit no weight are about the
            optimizer's state.
        force: Replace the folder if it is a dump.

    Returns:
        The folder, complete on every rank.

    Raises:
        DumpError: The folder exists and may not be replaced; every rank raises it.
        MeshError: The mesh has no such axis, or none is given and the model's tensors do not show one.
        ShardvizError: No process group is initialized, ranks of one stage stamped different tensors, both stamps and
            a reference or a step are given, or the step has what it cannot have.

    Example:
        In a training script, on every rank; afterwards run `shardviz check before_training.shardviz`:

            model = build()
            stamps = shardviz.stamp(model)
            parallelize(model, mesh)
            shardviz.capture(model, "before_training.shardviz", mesh=mesh, stamps=stamps)
    """
    refuse_without_group("call shardviz.capture in a rank of a distributed job")
    check_step(step or {})
    if stamps is not None and (reference is not None or step is not None):
        what = "look up" if reference is not None else "step with"
        alternative = "a reference" if reference is not None else "a step"
        raise ShardvizError(f"a stamped model has no values left to {what}", f"give stamps or {alternative}, not both")
    mesh = mesh or found_mesh(model)
    if reference is not None:
        pipeline_part, source = PipelinePart(tuple(stage_axes)), ComparedWith(opened(reference), reference_names or {})
        return capture_by_reference(model, Path(path), mesh, source, pipeline_part, step, intended, force=force)
    names = [local.name for local in local_tensors(unwrapped(model))]
    if stamps is not None and not stage_axes:
        stamps = under_names(stamps, names)
    pipeline_part = agree(plain_mesh(mesh), stage_axes, stamps.stamps if stamps else (), names)
    with dump_of_job(Path(path), mesh, pipeline_part, intended, force=force) as rank_capture:
        if add_model(rank_capture, unwrapped(model), mesh, stamps, pipeline_part):
            rank_capture.not_checked.append(("", CAST))
        _add_rest(rank_capture, model, mesh, pipeline_part, step)
    return Path(path)


def _add_rest(
    rank_capture: Capture,
    model: nn.Module,
    mesh: DeviceMesh,
    pipeline_part: PipelinePart,
    step: Mapping[str, Any] | None,
) -> None:
    """Record what is not in the model's tensors.

    That is the axes of the mesh that split none of them, as if sharding over them was never called, the master copies
    and moments in an engine's flat buffers, and what a job's own step gave.
    """
    plain = plain_mesh(mesh)
    locals_ = list(local_tensors(unwrapped(model), plain))
    shapes = {name: stamp.shape for name, stamp in rank_capture.stamps.items()}
    rank_capture.not_checked += notes_on(idle_axes(model, plain, locals_, shapes, pipeline_part.axes), plain)
    add_masters(rank_capture, model, plain, pipeline_part)
    if step is not None:
        add_step(rank_capture, pipeline_part.of_stage(locals_), step, plain)


def capture_by_reference(
    model: nn.Module,
    path: Path,
    mesh: DeviceMesh,
    source: ComparedWith,
    pipeline_part: PipelinePart,
    step: Mapping[str, Any] | None = None,
    intended: Mapping[str, str] | None = None,
    *,
    force: bool,
    command: tuple[str, ...] = (),
) -> Path:
    """Write a dump whose ids are places in a reference. Every rank of the job calls this.

    Args:
        command: The command that the dump is of; the process's own by default.
    """
    reference, names, prefix = source.reference, source.names, pipeline_part.prefix
    tensors = pipeline_part.of_stage(local_tensors(unwrapped(model), plain_mesh(mesh)))
    locals_ = [local for local in tensors if not local.unknown]
    moments = [replace(local, name=prefix + local.name) for local in source.moments]
    locals_ += moments
    before = [tuple(prefix + name for name in together) for together in source.tied]
    whole = [local for local in locals_ if local.claim or tuple(local.values.shape) == local.shape]
    lookups = wanted_of(whole, [*tied_names(unwrapped(model), prefix), *before])
    merged = registry.checkpoint(unwrapped(model), reference)
    found_in = known_in(merged, lookups, names, strangers=reference.is_stamped)
    empty = {prefix + name for name in source.unwritten}
    without_notes = empty | {prefix + name for name in computed_buffers(unwrapped(model))}  # copies are compared
    notes = tuple(pair for pair in found_in.not_checked if pair[0] not in without_notes)
    found_in = replace(found_in, not_checked=notes)
    whole = as_copies(whole, plain_mesh(mesh), pipeline_part.axes)
    if reference.is_stamped:
        found_in = with_merged(replace(found_in, is_stamped=True), merged, lookups, whole)
        found_in = found_in if found_in.entries else known_in(merged, lookups, names)
    pipeline_part = replace(pipeline_part, stamps=tuple(found_in.stamps.values()))
    with dump_of_job(
        path, mesh, pipeline_part, intended, force=force, reference=reference.path.name, command=command
    ) as rank_capture:
        placed = [local.name for local in whole if local.name in found_in.stamps] if found_in.is_stamped else []
        add_model(rank_capture, unwrapped(model), mesh, None, pipeline_part, placed, found_in.shapes)
        add_by_reference(rank_capture, whole, found_in, source.sift)
        for moment in moments:
            rank_capture.add_values(moment, "initial")
        rank_capture.not_checked += [(name and prefix + name, note) for name, note in source.notes]
        rank_capture.unwritten += sorted(empty)
        rank_capture.replaced += [prefix + name for name in source.replaced]
        rank_capture.rounded += rounded_copies(locals_)
        rank_capture.skipped_keys += [(prefix + name, key) for name, key in sorted(source.skipped.items())]
        _add_rest(rank_capture, model, mesh, pipeline_part, step)
    return path


def capture_sharding(
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None],
    path: str | Path,
    *,
    mesh: DeviceMesh,
    stage_axes: Sequence[str] = (),
    intended: Mapping[str, str] | None = None,
    force: bool = False,
) -> Path:
    """Build, stamp and shard a model, and write a dump of it. Every rank calls this.

    The model may have any dtype.

    The model is built and sharded several times: once unchanged, for its own values, and then stamped. It is stamped in
    float64, and again if sharding casts it to a narrower dtype, with values that show the same in any. Random states
    are restored afterwards.

    Args:
        build: Builds the unsharded model, or this rank's stage of a pipeline; with values, not on the meta device.
        parallelize: Shards the model, in place or by returning a new one, as in a probe.
        path: As for `capture`.
        mesh: The mesh of the whole job.
        stage_axes: As for `capture`.
        intended: Layouts in the notation, by pattern over names.
        force: Replace the folder, if it is a dump.

    Returns:
        The folder, complete on every rank.

    Raises:
        DumpError: The folder exists and may not be replaced; every rank raises it.
        MeshError: The mesh has no such axis.
        ShardvizError: As `capture` and `stamp`.

    Example:
        On every rank of a job whose model is in bfloat16:

            def parallelize(model, mesh):
                fully_shard(model.to(torch.bfloat16), mesh=mesh)

            shardviz.capture_sharding(build, parallelize, "sharding.shardviz", mesh=mesh)
    """

    def sharded(model: nn.Module) -> nn.Module:
        returned = parallelize(model, mesh)
        return model if returned is None else returned

    refuse_without_group("call shardviz.capture_sharding in a rank of a distributed job")
    with kept_random_states():
        model = build()
        stamps = plan(model)
        model = sharded(model)
        names = [local.name for local in local_tensors(unwrapped(model))]
        pipeline_part = agree(plain_mesh(mesh), stage_axes, stamps, names)
        with dump_of_job(Path(path), mesh, pipeline_part, intended, force=force) as rank_capture:
            add_model(rank_capture, unwrapped(model), mesh, None, pipeline_part)
            del model
            capture_passes(rank_capture, Sharding(build, sharded, plain_mesh(mesh)), pipeline_part)
    return Path(path)


def add_model(
    rank_capture: Capture,
    model: nn.Module,
    mesh: DeviceMesh | None,
    stamps: Stamped | None,
    pipeline_part: PipelinePart | None = None,
    placed: Collection[str] = (),
    wholes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> int:
    """Capture a model's parameters and buffers: ids if it was stamped, its own values otherwise.

    Args:
        placed: Names of tensors whose values say nothing more than where they are.
        wholes: The shapes that a reference has of tensors with other shapes, which may be parts.

    Returns:
        How many tensors lost their ids.
    """
    pipeline_part = pipeline_part or PipelinePart()
    rank_capture.add_ties(model, pipeline_part.prefix)
    rank_capture.add_meshes(model)
    own_mesh = plain_mesh(mesh) if mesh is not None else None
    locals_ = pipeline_part.of_stage(local_tensors(model, own_mesh))
    shapes = {name: stamp.shape for name, stamp in rank_capture.stamps.items()}
    shapes |= stamps.shapes if stamps is not None else {}
    for local in locals_:
        if local.name not in placed and (stamps is None or local.unknown or local.name not in rank_capture.stamps):
            rank_capture.add_values(as_part(as_part(local, shapes), wholes, ("param", "buffer")), "initial")
    known = [local for local in locals_ if not local.unknown]
    return 0 if stamps is None else add_ids(rank_capture, known, stamps, pipeline_part, own_mesh)


KEYS = ("loss", "output", "log")


def check_step(step: object) -> None:
    """Make sure that a step is what `capture` takes, before any rank writes.

    Raises:
        ShardvizError: It is not a dictionary, has another key, or holds something that is not a number.
    """
    hint = 'write step={"loss": loss, "output": output, "log": {"grad_norm": norm}}'
    if not isinstance(step, Mapping):
        raise ShardvizError(f"step is a {type(step).__name__}, not a dictionary", hint)
    for key in step:
        if key not in KEYS:
            raise ShardvizError(f"step has {key!r}", did_you_mean(str(key), KEYS) or f"its keys are {', '.join(KEYS)}")
    logged = step.get("log", {})
    if not isinstance(logged, Mapping):
        raise ShardvizError(f'step["log"] is a {type(logged).__name__}, not a dictionary of numbers by name', hint)
    numbers = {f"log {name!r}": value for name, value in logged.items()} | {"loss": step.get("loss", 0.0)}
    for what, value in numbers.items():
        if not isinstance(value, int | float | torch.Tensor) or (torch.is_tensor(value) and value.numel() != 1):
            returned = list(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise ShardvizError(f"the step's {what} is {returned}, not one number", hint)
    if "output" in step and not torch.is_tensor(step["output"]):
        raise ShardvizError(f"the step's output is a {type(step['output']).__name__}, not a tensor", hint)


def add_step(capture: Capture, locals_: Sequence[Local], step: Mapping[str, Any], mesh: Mesh) -> None:
    """Record a step's results."""
    for local in locals_:
        if local.grad is not None:
            claim = local.grad_claim or local.claim
            capture.add_values(replace(local, role="grad", values=local.grad, claim=claim, grad=None), "step")
    everywhere = mesh, (Replicate(),) * mesh.ndim
    for name, value in step.get("log", {}).items():
        capture.add_values(Local(name, "scalar", (), _number(value), everywhere), "step")
    if "loss" in step and "loss" not in step.get("log", {}):
        capture.add_values(Local("loss", "scalar", (), _number(step["loss"])), "step")
    if "output" in step:
        capture.add_values(replace(of_tensor("output", "output", step["output"].detach()), grad=None), "step")


def _number(value: Any) -> torch.Tensor:
    """Return a value as a training loop would print it; for a pending sum, this rank's term."""
    return torch.tensor(float(value.detach()) if torch.is_tensor(value) else float(value), dtype=torch.float64)
