"""Run a probe on this rank: once with the model's own values and once with ids."""

from __future__ import annotations

import importlib
import inspect
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.dump.records.step import FROM_ONE_RANK
from shardviz.dump.records.tensors import SentRecord
from shardviz.dump.write import write_rank, write_run
from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import agreed_run_id
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.describe import rounded_copies
from shardviz.live.capture.idle_axes import idle_axes, notes_on
from shardviz.live.capture.passes import Sharding, capture_passes
from shardviz.live.capture.pipeline_parts import PipelinePart
from shardviz.live.claims.local import Local, as_part
from shardviz.live.claims.registry import local_tensors, unwrapped
from shardviz.live.claims.wrappers import reducing
from shardviz.live.compat.pipelines import let_stages_meet
from shardviz.live.dumping import check_axes, check_intended, made_folder
from shardviz.live.lines.frames import user_line
from shardviz.live.lines.rerun import Again, modules_asked_for
from shardviz.live.noting import load_file, noting
from shardviz.live.step.batch import add_sequence, sequence_dims
from shardviz.live.step.comms import collective_name, memory_of
from shardviz.live.step.probe_step import ProbeStep
from shardviz.live.step.running import tensors_in
from shardviz.live.step.unsharded.late_weights import as_built, repeating

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import ModuleType

    from torch import nn

    from shardviz.live.capture.stamp import Stamped
    from shardviz.live.job import ProbeJob
    from shardviz.live.world import World


def run_probe(world: World, job: ProbeJob) -> bool:
    """Run a probe on this rank and write its file; one rank writes `run.json` too.

    Returns:
        Whether this rank is that one.

    Raises:
        ProbeError: The probe's `build` does not return a module.
        NotationError: A layout in its `expect` cannot be read.
    """
    # torch's advice on speed and style would be printed once per rank and per build.
    warnings.filterwarnings("ignore", module=r"(torch|shardviz)\.")
    with noting(job.notes, writes=world.rank == 0):
        return _run(world, job)


def _run(world: World, job: ProbeJob) -> bool:
    probe = load_probe(job.probe.path, job.probe.build, job.probe.module)
    if hasattr(probe, "check_mesh"):
        probe.check_mesh(job.mesh)
    expect = getattr(probe, "expect", {})
    check_intended(expect)
    device_mesh = init_device_mesh(world.device_type, job.mesh.shape, mesh_dim_names=job.mesh.axes)
    run_id = agreed_run_id()
    writes_run = world.rank == 0 if job.force is None else made_folder(job.folder, run_id, force=job.force)
    capture = Capture(world.rank, world.num_ranks, values_limit=job.values_limit, run_id=run_id)
    capture.add_mesh(device_mesh)
    run = ProbeOnRank(probe, job, device_mesh, capture)
    run.capture_initial()
    check_axes(expect, capture.axes)
    stamped = add_sequence(run.capture_stamped(), probe, device_mesh, capture)
    if hasattr(probe, "batch"):
        ProbeStep(run).capture_step()
    if writes_run:
        record = run_record(
            world.num_ranks,
            job.mesh,
            job.command,
            run_id=run_id,
            probe=job.probe.name,
            stamps=stamped.stamps,
            intended=expect,
            sequence=sequence_dims(probe, stamped),
        )
        write_run(job.folder, record)
    write_rank(job.folder, capture.record(), capture.dense)
    if job.question and run.again is not None:
        opened: list[str] = []
        while modules := [
            module for module in modules_asked_for(job.question, job.folder, world.rank) if module not in opened
        ]:
            opened += modules
            for module in modules:
                run.again.add_lines(capture, module)
            write_rank(job.folder, capture.record(), capture.dense)
    return writes_run


def load_probe(path: Path, build: str = "build", module: str = "") -> ModuleType:
    """Import a probe by its module name, or from its file, next to which it may import others.

    Args:
        path: The probe's file.
        build: The name of the function that builds the model.
        module: The module to import instead of the file, if there is one.

    Raises:
        ProbeError: The probe does not define `build` or `parallelize`, or they or `batch` take other arguments.

    Example:
        probe = load_probe(Path(__file__).parent / "probes/mine.py")
        model = probe.parallelize(probe.build(), mesh)
    """
    probe = importlib.import_module(module) if module else load_file(path, f"shardviz_probe_{path.stem}")
    for needed in (build, "parallelize"):
        if not callable(getattr(probe, needed, None)):
            raise ProbeError(f"probe {path} has no {needed}()", "a probe defines build() and parallelize(model, mesh)")
    for name, given in ((build, ()), ("parallelize", ("model", "mesh")), ("batch", ())):
        _check_signature(path, name, getattr(probe, name, None), given)
    let_stages_meet()
    return probe


def _check_signature(path: Path, name: str, function: object, given: tuple[str, ...]) -> None:
    """Make sure that a probe's function can be called with what it is given."""
    if not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        call = f"{name}({', '.join(given)})"
        raise ProbeError(
            f"probe {path}: {name}{signature} cannot be called as {call}: {error}", f"define {call}"
        ) from None


def built_model(probe: ModuleType, build: str) -> nn.Module:
    """Build a probe's model, with the same values every time.

    Raises:
        ProbeError: It is not a module.
    """
    torch.manual_seed(0)
    return as_module(getattr(probe, build)(), f"{build}()", "return a torch.nn.Module")


def as_module(value: object, call: str, hint: str) -> nn.Module:
    """Return what a call of a probe's function returned, or raise a `ProbeError` if that is not a module."""
    if not isinstance(value, torch.nn.Module):
        raise ProbeError(f"{call} returned {type(value).__name__}", hint)
    return value


@dataclass
class ProbeOnRank:
    """One probe on one rank.

    Attributes:
        probe: The probe's module.
        job: The probe's job: its mesh, its folder and its options.
        device_mesh: The mesh, as torch's object.
        capture: Collects the tensors of this rank.
        again: Runs the step again, if it went wrong in a module on any rank.
    """

    probe: ModuleType
    job: ProbeJob
    device_mesh: DeviceMesh
    capture: Capture
    again: Again | None = None

    @property
    def part(self) -> PipelinePart:
        """This rank's part of the model, which is built whole on all ranks."""
        return PipelinePart(tuple(getattr(self.probe, "STAGE_AXES", ())))

    @property
    def _ordinary_axes(self) -> tuple[str, ...]:
        """The axes that the probe says are of the batch, or of a pipeline."""
        return (*getattr(self.probe, "BATCH_AXES", ()), *self.part.axes)

    def capture_initial(self) -> None:
        """Capture the model's values after sharding: some bugs show in values but not in ids."""
        built = self.built()
        shapes = {local.name: local.shape for local in local_tensors(built)}
        wholes = repeating(built, self.job.mesh)
        varied = {one.name for one in local_tensors(built) if one.role == "param" and one.values.numel() > 1}
        varied -= {one.name for one in local_tensors(built) if one.values.is_meta or one.is_constant}
        with Sends() as sends:
            model = self.initialized(self.parallelized(built))
        self.capture.as_built += as_built(model, wholes, self.job.mesh, self.capture.rank)
        self.capture.wrappers = reducing(model, self.part.prefix)
        locals_ = self.part.of_stage(local_tensors(unwrapped(model), self.job.mesh))
        for local in locals_:
            self.capture.add_values(as_part(local, shapes), "initial")
        self.capture.filled += [local.name for local in locals_ if local.is_constant and local.name in varied]
        self.capture.rounded += rounded_copies(locals_)
        self.capture.sent += sends.records(locals_)
        idle = idle_axes(model, self.job.mesh, locals_, shapes, self._ordinary_axes)
        self.capture.not_checked += notes_on(idle, self.job.mesh)
        self.capture.add_ties(model)
        self.capture.add_meshes(model)

    def capture_stamped(self) -> Stamped:
        """Capture every element's place by its id, and the tensors that torch gathers."""
        return capture_passes(self.capture, Sharding(self.built, self.parallelized, self.job.mesh), self.part)

    def built(self) -> nn.Module:
        """Build the probe's model, with the same values every time."""
        return built_model(self.probe, self.job.probe.build)

    def parallelized(self, model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
        """Shard a model as the probe does, on the probe's mesh or on another one, once it is on the mesh's device."""
        if self.device_mesh.device_type != "cpu" and not any(one.values.is_meta for one in local_tensors(model)):
            model.to(self.device_mesh.device_type)
        returned = self.probe.parallelize(model, mesh or self.device_mesh)
        return model if returned is None else returned

    def initialized(self, model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
        """Let a probe fill a model sharded without values; stamped weights stay as they are."""
        if hasattr(self.probe, "initialize"):
            self.probe.initialize(model, mesh or self.device_mesh)
        return model


class Sends(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is broadcast or scattered while a model is sharded, and into which memory it is copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent: dict[int, tuple[str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        op = collective_name(func)
        if op in FROM_ONE_RANK:
            line = user_line()
            place = f"{line.file}:{line.line}" if line is not None else ""
            self._sent |= dict.fromkeys(map(memory_of, tensors_in(args[:1])), (op, place))
        elif not op and self._sent:
            self._follow(str(func), list(tensors_in(args)), returned)
        return returned

    def _follow(self, name: str, given: list[torch.Tensor], returned: Any) -> None:
        """Note that a copy has what was sent, and that memory that is new or written over has not."""
        if "copy_" in name and len(given) > 1:
            source, target = self._sent.get(memory_of(given[1])), memory_of(given[0])
            self._sent.pop(target, None)
            if source is not None:
                self._sent[target] = source
        elif isinstance(returned, torch.Tensor):
            is_written = name.rpartition(".")[0].endswith("_")
            if is_written or memory_of(returned) not in map(memory_of, given):
                self._sent.pop(memory_of(returned), None)

    def records(self, locals_: Iterable[Local]) -> Iterator[SentRecord]:
        """Yield the tensors that hold what was sent."""
        for local in locals_:
            op, place = self._sent.get(memory_of(local.values), ("", ""))
            if place:
                yield SentRecord(local.name, op, place)
