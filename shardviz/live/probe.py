"""Run a probe on this rank: build, stamp, parallelize, capture; once with the model's own values and once with ids."""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardviz.dump.write import write_rank, write_run
from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import agreed_errors, agreed_run_id
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.intended import check_intended
from shardviz.live.capture.locals import local_tensors, unwrapped
from shardviz.live.capture.passes import Sharding, capture_passes
from shardviz.live.capture.pipeline_parts import PipelinePart
from shardviz.live.step import placing
from shardviz.live.step.observe import adam_states
from shardviz.live.step.reference import reference_of
from shardviz.live.step.sequence import add_sequence, sequence_dims
from shardviz.live.step.step import (
    batch_axes,
    calls,
    gradients,
    own_batch,
    results,
    sharded_step,
    unnamed_batch_axes,
    whole_batch,
)
from shardviz.live.step.update import copied_gradients, told_apart, update_of, updated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.locals import Local
    from shardviz.live.capture.stamp import Stamped
    from shardviz.live.job import ProbeJob
    from shardviz.live.step.step import Step
    from shardviz.live.world import World

Done = TypeVar("Done")


def run_probe(world: World, job: ProbeJob) -> None:
    """Run a probe on this rank and write the rank's file; rank 0 writes `run.json` too.

    Raises:
        ProbeError: The probe's `build` returns no module.
        NotationError: A layout of its `expect` cannot be read.
    """
    # What torch advises on speed and style would stand there once a rank and a build.
    warnings.filterwarnings("ignore", module=r"(torch|shardviz)\.")
    probe = load_probe(job.path, job.build, job.module)
    if hasattr(probe, "check_mesh"):
        probe.check_mesh(job.mesh)
    check_intended(getattr(probe, "expect", {}))
    device_mesh = init_device_mesh(world.device_type, job.mesh.shape, mesh_dim_names=job.mesh.axes)
    capture = Capture(world.rank, world.num_ranks, values_limit=job.values_limit, run_id=agreed_run_id())
    capture.add_mesh(device_mesh)
    run = Run(probe, job, device_mesh, capture)
    run.capture_initial()
    stamped = add_sequence(run.capture_stamped(), probe, device_mesh, capture)
    if hasattr(probe, "batch"):
        run.capture_step()
    if world.rank == 0:
        intended, sequence = getattr(probe, "expect", {}), sequence_dims(probe, stamped)
        record = run_record(
            job.mesh,
            stamped,
            intended,
            command=job.command,
            probe=job.name,
            sequence=sequence,
            run_id=capture.run_id,
        )
        write_run(job.folder, record)
    write_rank(job.folder, capture.record(), capture.dense)


def load_probe(path: Path, build: str = "build", module: str = "") -> ModuleType:
    """Import a probe: by its name if it has one, or its file, under a name of its own and with the files beside it.

    Raises:
        ProbeError: It defines no such function.
    """
    probe = importlib.import_module(module) if module else _load_file(path)
    for needed in (build, "parallelize"):
        if not callable(getattr(probe, needed, None)):
            raise ProbeError(f"probe {path} has no {needed}()", "a probe defines build() and parallelize(model, mesh)")
    return probe


def _load_file(path: Path) -> ModuleType:
    name = f"shardviz_probe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


@dataclass
class Run:
    """One probe on one rank.

    Attributes:
        probe: The probe's module.
        job: What to run.
        device_mesh: The mesh, as torch has it.
        capture: Where what is seen goes.
    """

    probe: ModuleType
    job: ProbeJob
    device_mesh: DeviceMesh
    capture: Capture

    @property
    def part(self) -> PipelinePart:
        """What ranks have of the model; it is built whole on all of them."""
        return PipelinePart(tuple(getattr(self.probe, "STAGE_AXES", ())))

    def capture_initial(self) -> None:
        """Capture the model's own values after sharding: arange hides what only real values show."""
        model = self._initialized(self._parallelized(self._built()))
        for local in self.part.own(local_tensors(unwrapped(model), self.job.mesh)):
            self.capture.add_values(local, "initial")
        self.capture.add_ties(model)
        self.capture.add_meshes(model)

    def capture_stamped(self) -> Stamped:
        """Capture where every element went, by its id, and what torch gathers from the shards."""
        return capture_passes(self.capture, Sharding(self._built, self._parallelized, self.job.mesh), self.part)

    def capture_step(self) -> None:
        """Step the unsharded model and then the sharded one, and lay them side by side.

        Where only the sharded step raises, as torch does for uneven tensor parallel, that is noted and not an error.
        """
        axes = batch_axes(self.probe, self.job.mesh)
        parts = math.prod(self.job.mesh.axis_size(axis) for axis in axes)
        batch = whole_batch(self.probe, parts)
        reference = reference_of(self.probe, lambda: self._built().double(), batch, parts)
        if reference.draws:
            self.capture.not_checked += [("", note) for note in reference.notes]
            return
        model = reference.mode(self._initialized(self._parallelized(self._built().double())))
        own = own_batch(batch, axes, self.device_mesh)
        step = self._attempt("step", lambda: sharded_step(self.probe, model, own, self.device_mesh))
        reference = reference if step is None else reference.beside(step)
        self.capture.not_checked += [("", note) for note in reference.notes]
        if step is None:
            return
        if unnamed := unnamed_batch_axes(self.probe, self.job.mesh):
            why = f"reductions over {', '.join(unnamed)}: every rank saw the same batch, BATCH_AXES names no such axis"
            self.capture.not_checked.append(("", why))
        self._add_step(model, step, reference.step, axes)
        if self.capture.rank == 0:
            after = [*gradients(list(local_tensors(reference.model))), *results(reference.step, self.job.mesh, ())]
            for local in [*reference.before, *after]:
                self.capture.add_values(replace(local, claim=None), "reference")

    def _attempt(self, what: str, work: Callable[[], Done]) -> Done | None:
        """Do what may raise on some ranks only; None, and the first error noted, where it does on any."""
        done, failure = None, None
        try:
            done = work()
        except Exception as error:
            failure = error
        errors = agreed_errors(failure, self.job.folder, what)
        for rank, text in enumerate(errors):
            if text:
                self.capture.not_checked.append(("", f"the {what}: rank {rank} raised {text}"))
                return None
        return done

    def _updated(self, model: nn.Module, before: list[Local], step: Step) -> tuple[list[Local], list[Local]]:
        """Let the optimizer step: Adam, of which the state is kept alone, where the probe has none of its own.

        Returns:
            The tensors with the gradients that are to be judged; and the optimizer's state and the weights it left.
        """
        if not hasattr(self.probe, "optimizer"):
            return before, adam_states(model, before)
        before = copied_gradients(before)
        own = self._attempt("optimizer", lambda: updated(self.probe, model, self.device_mesh, step.seen))
        if own is None:
            return before, []
        after = list(local_tensors(unwrapped(model), self.job.mesh))
        update = update_of(own, unwrapped(model), before, after)
        self.capture.not_checked += [("", why) for why in update.not_checked]
        return told_apart(before, after), update.tensors

    def _add_step(self, model: nn.Module, step: Step, reference: Step, axes: Sequence[str]) -> None:
        """Write down what a sharded step left: gradients, optimizer state, outputs, and what ranks sent each other."""
        own = self.part.own(local_tensors(unwrapped(model), self.job.mesh))
        locals_, of_optimizer = self._updated(model, own, step)
        if step.output is not None and step.runs != reference.runs:
            why = f"the output: the model ran {step.runs} times in a step, the unsharded model {reference.runs} times"
            self.capture.not_checked.append(("", why))
            step = replace(step, output=None)
        rank, seen = self.capture.rank, step.seen.activations
        activations = placing.placed(seen, reference.seen.activations, self.job.mesh, rank)
        of_step = [*gradients(locals_), *self.part.own([*of_optimizer, *activations])]
        for local in [*of_step, *results(step, self.job.mesh, axes, reference.output)]:
            self.capture.add_values(local, "step")
        self.capture.collectives += step.seen.comms.records(self.job.mesh, self.capture.rank)
        self.capture.narrowed_to |= step.seen.comms.narrowed_to | reference.seen.comms.narrowed_to
        self.capture.schedule += step.seen.schedule
        self.capture.calls += calls(self.probe, model, self.device_mesh)

    def _built(self) -> nn.Module:
        torch.manual_seed(0)
        model = getattr(self.probe, self.job.build)()
        if not isinstance(model, torch.nn.Module):
            kind = type(model).__name__
            raise ProbeError(f"probe {self.job.name}: {self.job.build}() returned {kind}", "return a torch.nn.Module")
        return model

    def _parallelized(self, model: nn.Module) -> nn.Module:
        returned = self.probe.parallelize(model, self.device_mesh)
        return model if returned is None else returned

    def _initialized(self, model: nn.Module) -> nn.Module:
        """Let a probe fill a model that it shards before it has values; stamped weights are left alone."""
        if hasattr(self.probe, "initialize"):
            self.probe.initialize(model, self.device_mesh)
        return model
