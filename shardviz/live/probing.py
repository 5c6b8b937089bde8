"""Run a probe on this rank: build, stamp, parallelize, capture; once with the model's own values and once with ids."""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardviz.dump.tensors import ID_NONE
from shardviz.dump.write import write_rank, write_run
from shardviz.errors import ProbeError
from shardviz.live import describe, gather, placing
from shardviz.live.capture import Capture, Local, local_tensors, run_record, unwrapped
from shardviz.live.compat import DTensor, clean_name
from shardviz.live.meshes import without_axes
from shardviz.live.observe import adam_states, optimizer_states
from shardviz.live.stamp import Digits, Stamped, exact_bits, named_tensors, stamp
from shardviz.live.step import (
    batch_axes,
    gradients,
    own_batch,
    reference_step,
    results,
    sharded_step,
    unnamed_batch_axes,
    whole_batch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import ModuleType

    from numpy.typing import NDArray
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.job import ProbeJob
    from shardviz.live.step import Step
    from shardviz.live.world import World


def run_probe(world: World, job: ProbeJob) -> None:
    """Run a probe on this rank and write the rank's file; rank 0 writes `run.json` too.

    Raises:
        ProbeError: The probe's `build` returns no module.
    """
    # What torch advises on speed and style would stand there once a rank and a build.
    warnings.filterwarnings("ignore", module=r"(torch|shardviz)\.")
    probe = load_probe(job.path, job.build)
    if hasattr(probe, "check_mesh"):
        probe.check_mesh(job.mesh)
    device_mesh = init_device_mesh(world.device_type, job.mesh.shape, mesh_dim_names=job.mesh.axes)
    capture = Capture(world.rank, world.num_ranks, values_limit=job.values_limit)
    capture.add_mesh(device_mesh)
    run = Run(probe, job, device_mesh, capture)
    run.capture_initial()
    stamped = run.capture_stamped()
    if hasattr(probe, "batch"):
        run.capture_step()
    if world.rank == 0:
        intended = getattr(probe, "expect", {})
        write_run(job.folder, run_record(job.mesh, stamped, intended, command=job.command, probe=job.name))
    write_rank(job.folder, capture.record(), capture.dense)


def load_probe(path: Path, build: str = "build") -> ModuleType:
    """Import a probe's file under a name of its own; the files beside it can be imported by it.

    Raises:
        ProbeError: It defines no such function.
    """
    name = f"shardviz_probe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    for needed in (build, "parallelize"):
        if not callable(getattr(module, needed, None)):
            raise ProbeError(f"probe {path} has no {needed}()", "a probe defines build() and parallelize(model, mesh)")
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

    def capture_initial(self) -> None:
        """Capture the model's own values after sharding: arange hides what only real values show."""
        model = self._initialized(self._parallelized(self._built()))
        for local in self._locals(model):
            self.capture.add_values(local, "initial")
        self.capture.add_ties(model)
        self.capture.add_meshes(model)

    def capture_stamped(self) -> Stamped:
        """Capture where every element went, by its id, and what torch gathers from the shards."""
        model, stamped = self._stamped_model(None)
        self.capture.stamps = {stamp.name: stamp for stamp in stamped.stamps}
        self.capture.not_applied += stamped.not_applied
        self.capture.not_checked += stamped.not_stamped
        last = max((stamp.first + math.prod(stamp.shape) - 1 for stamp in stamped.stamps), default=0)
        locals_ = self._locals(model)
        bits = min((exact_bits(local.values.dtype) or 64 for local in locals_), default=64)
        if last < 2**bits:
            for local in locals_:
                if exact_bits(local.values.dtype):
                    self.capture.add_ids(local, describe.ids_of(local.values, last))
            self._gather(model, last)
        else:
            self._capture_digits(bits, last)
        return stamped

    def capture_step(self) -> None:
        """Step the unsharded model and then the sharded one, and lay them side by side.

        Where only the sharded step raises, as torch does for uneven tensor parallel, that is noted and not an error.
        """
        axes = batch_axes(self.probe, self.job.mesh)
        batch = whole_batch(self.probe, math.prod(self.job.mesh.axis_size(axis) for axis in axes))
        unsharded = self._built().double()
        before = [replace(local, values=local.values.clone()) for local in local_tensors(unsharded)]
        reference = reference_step(self.probe, unsharded, batch)
        model = self._initialized(self._parallelized(self._built().double()))
        own = own_batch(batch, axes, self.device_mesh)
        step, failure = None, None
        try:
            step = sharded_step(self.probe, model, own, self.device_mesh)
        except Exception as error:
            failure = error
        errors = gather.agreed_errors(failure, self.job.folder)
        if step is None or any(errors):
            rank, first = next((rank, text) for rank, text in enumerate(errors) if text)
            self.capture.not_checked.append(("", f"the step: rank {rank} raised {first}"))
            return
        if unnamed := unnamed_batch_axes(self.probe, self.job.mesh):
            why = f"reductions over {', '.join(unnamed)}: every rank saw the same batch, BATCH_AXES names no such axis"
            self.capture.not_checked.append(("", why))
        self._add_step(model, step, reference, axes)
        if self.capture.rank == 0:
            after = [*gradients(list(local_tensors(unsharded))), *results(reference, self.job.mesh, ())]
            for local in [*before, *after]:
                self.capture.add_values(replace(local, claim=None), "reference")

    def _add_step(self, model: nn.Module, step: Step, reference: Step, axes: Sequence[str]) -> None:
        """Write down what a sharded step left: gradients, optimizer state, outputs, and what ranks sent each other."""
        locals_ = self._locals(model)
        own = step.optimizer
        states = adam_states(locals_) if own is None else optimizer_states(own, unwrapped(model), locals_)
        rank, seen = self.capture.rank, step.seen.activations
        activations = placing.placed(seen, reference.seen.activations, self.job.mesh, rank)
        of_step = [*gradients(locals_), *self._apart([*states, *activations])]
        for local in [*of_step, *results(step, self.job.mesh, axes)]:
            self.capture.add_values(local, "step")
        self.capture.collectives += step.seen.comms.records(self.job.mesh, self.capture.rank)
        self.capture.schedule += step.seen.schedule

    def _capture_digits(self, bits: int, last: int) -> None:
        """Stamp again, a digit a pass, where some dtype is too narrow for whole ids."""
        base = 2**bits - 1
        places = math.ceil(math.log(last + 1, base))
        ids: dict[str, NDArray[np.int64]] = {}
        known: dict[str, Local] = {}
        for place in range(places):
            model, _ = self._stamped_model(Digits(base, place, places))
            for local in self._locals(model):
                if exact_bits(local.values.dtype):
                    digits = describe.ids_of(local.values, base)
                    before = ids.get(local.name, np.zeros_like(digits))
                    whole = np.where((digits > 0) & (before >= 0), before + (digits - 1) * base**place, ID_NONE)
                    ids[local.name] = np.where((digits == 0) & (before == 0), 0, whole)
                    known[local.name] = local
        for name, local in known.items():
            self.capture.add_ids(local, ids[name])
        self.capture.not_checked.append(("", f"full_tensor: ids were written in {places} passes, a digit a pass"))

    def _gather(self, model: nn.Module, last: int) -> None:
        """Let torch reassemble every DTensor, to be laid beside shardviz's own reassembly."""
        sharded = {
            clean_name(name): tensor
            for _, name, tensor in named_tensors(unwrapped(model))
            if isinstance(tensor, DTensor) and clean_name(name) in self.capture.stamps and exact_bits(tensor.dtype)
        }
        refused = gather.refused(sharded)
        for name, tensor in sharded.items():
            if name in refused:
                self.capture.not_checked.append((name, f"full_tensor was not run: {refused[name]}"))
                continue
            try:
                full = gather.full_tensor(tensor)
            except Exception as error:
                self.capture.add_gather_error(name, "full_tensor", error)
            else:
                self.capture.add_gathered(name, "full_tensor", describe.ids_of(full, last))

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

    def _stamped_model(self, digits: Digits | None) -> tuple[nn.Module, Stamped]:
        """Build, stamp and shard; where the model's own dtypes are too narrow for whole ids, in float64."""
        model = self._built()
        if digits is None and not _holds_ids(model):
            model = model.double()
        stamped = stamp(model, digits)
        return self._parallelized(model), stamped

    def _locals(self, model: nn.Module) -> list[Local]:
        return self._apart(local_tensors(unwrapped(model), self.job.mesh))

    def _apart(self, locals_: Iterable[Local]) -> list[Local]:
        """Claim nothing along the axes of a pipeline: other ranks along them have other layers, not copies of these."""
        axes, rank = getattr(self.probe, "STAGE_AXES", ()), self.capture.rank
        return [replace(one, claim=one.claim and without_axes(one.claim, axes, rank)) for one in locals_]


def _holds_ids(model: nn.Module) -> bool:
    tensors = [tensor for _, _, tensor in named_tensors(model) if tensor.is_floating_point()]
    bits = min((exact_bits(tensor.dtype) for tensor in tensors), default=64)
    numel: int = sum(tensor.numel() for _, _, tensor in named_tensors(model))
    return bool(numel < 2**bits)
