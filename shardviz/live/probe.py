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

from shardviz.dump.records import WHOLE_LOSS
from shardviz.dump.write import write_rank, write_run
from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import agreed_errors, agreed_run_id
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.intended import check_axes, check_intended
from shardviz.live.capture.locals import local_tensors, of_tensor, unwrapped
from shardviz.live.capture.passes import Sharding, capture_passes
from shardviz.live.capture.pipeline_parts import PipelinePart
from shardviz.live.compat import clean_name, held_back, use_public_names
from shardviz.live.step import placing
from shardviz.live.step.drawn import drawn_after_sharding, load
from shardviz.live.step.masks import Mask, Masks, mask_records
from shardviz.live.step.micro_batches import gradients_of_micro_batches
from shardviz.live.step.observe import adam_states, optimizer_states
from shardviz.live.step.output_dims import merged_dims
from shardviz.live.step.reference import reference_of
from shardviz.live.step.sequence import add_sequence, sequence_dims
from shardviz.live.step.step import (
    batch_axes,
    calls,
    gradients,
    has_last_stage,
    loss_of,
    num_parts,
    own_batch,
    results,
    row_axes,
    sharded_step,
    stages_of,
    unnamed_batch_axes,
    whole_batch,
)
from shardviz.live.step.update import copied_gradients, distinct_gradients, update_of, updated
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.locals import Local
    from shardviz.live.capture.stamp import Stamped
    from shardviz.live.job import ProbeJob
    from shardviz.live.step.reference import Reference
    from shardviz.live.step.step import Batch, StepResult
    from shardviz.live.world import World

Done = TypeVar("Done")

MAX_LISTED = 4
FIRST_SEED = 1000
"""Where each rank is seeded differently, rank 0 begins with this."""
DRAWN = (
    "drawn or loaded after sharding: the unsharded model's step starts from these values, put together as their "
    "placements say, and whether they are the intended ones is not known"
)


def run_probe(world: World, job: ProbeJob) -> None:
    """Run a probe on this rank and write the rank's file; rank 0 writes `run.json` too.

    Raises:
        ProbeError: The probe's `build` does not return a module.
        NotationError: A layout in its `expect` cannot be read.
    """
    # torch's advice on speed and style would be printed once per rank and per build.
    warnings.filterwarnings("ignore", module=r"(torch|shardviz)\.")
    probe = load_probe(job.path, job.build, job.module)
    if hasattr(probe, "check_mesh"):
        probe.check_mesh(job.mesh)
    expect = getattr(probe, "expect", {})
    check_intended(expect)
    device_mesh = init_device_mesh(world.device_type, job.mesh.shape, mesh_dim_names=job.mesh.axes)
    capture = Capture(world.rank, world.num_ranks, values_limit=job.values_limit, run_id=agreed_run_id())
    capture.add_mesh(device_mesh)
    run = ProbeOnRank(probe, job, device_mesh, capture)
    run.capture_initial()
    check_axes(expect, capture.axes)
    stamped = add_sequence(run.capture_stamped(), probe, device_mesh, capture)
    if hasattr(probe, "batch"):
        run.capture_step()
    if world.rank == 0:
        record = run_record(
            job.mesh,
            stamped,
            expect,
            command=job.command,
            probe=job.name,
            sequence=sequence_dims(probe, stamped),
            run_id=capture.run_id,
        )
        write_run(job.folder, record)
    write_rank(job.folder, capture.record(), capture.dense)


def load_probe(path: Path, build: str = "build", module: str = "") -> ModuleType:
    """Import a probe, by its module name or else from its file, from which it can also import the files beside it.

    Args:
        path: The probe's file.
        build: The name of the function that builds the model.
        module: The module to import instead of the file, if there is one.

    Raises:
        ProbeError: The probe does not define `build` or `parallelize`.

    Example:
        probe = load_probe(Path(__file__).parent / "probes/mine.py")
        model = probe.parallelize(probe.build(), mesh)
    """
    use_public_names()
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


@dataclass(frozen=True)
class Failed:
    """Why a step could not be compared.

    Attributes:
        text: Who raised what, in a line.
        unsharded: The exception, where the unsharded model raised it.
    """

    text: str
    unsharded: Exception | None = None


@dataclass
class ProbeOnRank:
    """One probe on one rank.

    Attributes:
        probe: The probe's module.
        job: The probe's job: its mesh, its folder and its options.
        device_mesh: The mesh, as torch's object.
        capture: Collects the tensors of this rank.
    """

    probe: ModuleType
    job: ProbeJob
    device_mesh: DeviceMesh
    capture: Capture

    @property
    def part(self) -> PipelinePart:
        """This rank's part of the model, which is built whole on all ranks."""
        return PipelinePart(tuple(getattr(self.probe, "STAGE_AXES", ())))

    def capture_initial(self) -> None:
        """Capture the model's own values after sharding: some bugs show only in real values, not in ids."""
        model = self._initialized(self._parallelized(self._built()))
        for local in self.part.own(local_tensors(unwrapped(model), self.job.mesh)):
            self.capture.add_values(local, "initial")
        self.capture.add_ties(model)
        self.capture.add_meshes(model)

    def capture_stamped(self) -> Stamped:
        """Capture where every element went, by its id, and the tensors that torch gathers from the shards."""
        return capture_passes(self.capture, Sharding(self._built, self._parallelized, self.job.mesh), self.part)

    def capture_step(self) -> None:
        """Step the unsharded model and then the sharded one, and capture both.

        Both in float64, where rounding hides nothing; where that raises, as it does for kernels that want bfloat16,
        both again in their own element types.
        """
        failed = self._step(double=True)
        if failed is None:
            return
        again = self._step(double=False)
        if again is None:
            why = f"the step in float64: {failed.text}; compared in the model's own element types"
            self.capture.not_checked.append(("", why))
        elif again.unsharded is not None:
            raise again.unsharded
        else:
            self.capture.raised.append(("step", again.text))

    def _step(self, *, double: bool) -> Failed | None:
        """Step both models and capture them; return why that cannot be."""

        def built() -> nn.Module:
            return self._built().double() if double else self._built()

        axes = batch_axes(self.probe, self.job.mesh)
        rows = row_axes(axes)
        parts = math.prod(self.job.mesh.axis_size(axis) for axis in rows)
        batch = whole_batch(self.probe, axes, self.job.mesh, double=double)
        model = self._initialized(self._parallelized(built()))
        drawn = drawn_after_sharding(model, built(), self.job.mesh, self.capture.rank)
        failure = None
        try:
            dim = axes[rows[0]] if rows else 0
            reference = reference_of(self.probe, lambda: load(built(), drawn), batch, parts, dim)
        except ProbeError:
            raise
        except Exception as error:
            failure = error
        errors = agreed_errors(failure, self.job.folder, "reference" if double else "reference again")
        if any(errors):
            return Failed(f"the unsharded model raised {next(filter(None, errors))}", failure)
        if reference.draws:
            self.capture.not_checked += [("", note) for note in reference.notes]
            return None
        if drawn:
            self.capture.not_checked.append(("", f"{listed(drawn, MAX_LISTED)}: {DRAWN}"))
        model = reference.mode(model)
        own = own_batch(batch, axes, self.device_mesh)
        step, failed = self._sharded_step(model, own, "step" if double else "step again")
        if step is None:
            return Failed(failed)
        reference = reference.beside(step)
        self.capture.not_checked += [("", note) for note in reference.notes]
        if unnamed := unnamed_batch_axes(self.probe, self.job.mesh):
            over = ", ".join(unnamed)
            why = f"reductions over {over}: every rank saw the same batch, because the probe has no BATCH_AXES"
            self.capture.not_checked.append(("", why))
        unsharded = copied_gradients(list(local_tensors(reference.model)))
        of_parts = gradients_of_micro_batches(self.probe, lambda: load(built(), drawn), batch, parts, step, reference)
        update = self._updated_reference(reference)
        self._add_step(model, step, reference.step, axes, is_compared=any(one.role == "param" for one in update))
        if self.capture.rank == 0:
            after = [*gradients(unsharded), *results(reference.step, self.job.mesh, {})]
            if reference.is_mean_of_means and reference.whole is not None:
                after.append(of_tensor(WHOLE_LOSS, "scalar", reference.whole.step.loss))
            for local in [*reference.before, *after]:
                self.capture.add_values(replace(local, claim=None), "reference")
            for local in update:
                self.capture.add_values(replace(local, claim=None, grad=None), "updated")
            for local in of_parts:
                self.capture.add_values(replace(local, claim=None), "reference")
        if not reference.training:
            self._add_training(own, axes, reference.step.output, built)
            self._add_masks(own, batch, built)
        return None

    def _add_training(
        self, own: Batch, axes: Mapping[str, int], whole: torch.Tensor | None, built: Callable[[], nn.Module]
    ) -> None:
        """Record a step of a model that draws random numbers as it trains: its copies, at least, must be equal."""
        model = self._initialized(self._parallelized(built()))
        step, failed = self._sharded_step(model, own, "training")
        if step is None:
            self.capture.not_checked.append(("", f"the step in training mode: {failed}"))
            return
        of_step = gradients(self.part.own(local_tensors(unwrapped(model), self.job.mesh)))
        for local in [*of_step, *results(replace(step, logged={}), self.job.mesh, axes, whole)]:
            self.capture.add_values(local, "training")

    def _add_masks(self, own: Batch, batch: Batch, built: Callable[[], nn.Module]) -> None:
        """Record the masks that ranks draw, seeded alike and seeded differently, beside the unsharded model's."""
        found: list[list[Mask]] = []
        for what, seed in (("masks", 2), ("masks again", FIRST_SEED + self.capture.rank)):
            with Masks() as masks:
                step, _ = self._sharded_step(self._initialized(self._parallelized(built())), own, what, seed)
            if step is None:
                return
            found.append(masks.found)
        with Masks() as whole:
            loss_of(self.probe, built(), batch)
        self.capture.masks += mask_records(found[0], found[1], whole.found)

    def _sharded_step(self, model: nn.Module, own: Batch, what: str, seed: int = 2) -> tuple[StepResult | None, str]:
        """Step the sharded model; return None and the first error if any rank raised one."""
        probe, mesh = self.probe, self.device_mesh
        stages, failed = self._attempt(f"{what} stages", lambda: stages_of(probe, model, mesh))
        if stages is None:
            return None, failed
        has_output = has_last_stage(probe, stages, mesh)
        return self._attempt(
            what, lambda: sharded_step(probe, model, own, mesh, stages, has_output=has_output, seed=seed)
        )

    def _updated_reference(self, reference: Reference) -> list[Local]:
        """Return the unsharded model's buffers after its step, and what the probe's optimizer makes of its weights."""
        model, buffers = reference.model, self._buffers_after(reference)
        if hasattr(self.probe, "optimizer"):
            what, seen = "optimizer of the unsharded model", reference.step.seen
            own, failed = self._attempt(what, lambda: updated(self.probe, model, self.device_mesh, seen))
            if own is None:
                self.capture.not_checked.append(("", f"the {what}: {failed}"))
            else:
                params = [local for local in local_tensors(model) if local.role == "param"]
                return [*params, *optimizer_states(own, model, params), *buffers]
        return buffers

    def _buffers_after(self, reference: Reference) -> list[Local]:
        """Return the unsharded model's buffers after a step on the whole batch; none where ranks' parts differ."""
        whole = reference.whole if reference.is_mean_of_means and reference.whole is not None else reference
        buffers = [local for local in local_tensors(whole.model) if local.role == "buffer"]
        return buffers if whole.whole is None else []

    def _attempt(self, what: str, work: Callable[[], Done]) -> tuple[Done | None, str]:
        """Do work that may raise on some ranks only. If it raises on any rank, return None and the first error."""
        done, failure = None, None
        try:
            done = work()
        except Exception as error:
            failure = error
        errors = agreed_errors(failure, self.job.folder, what)
        found = next((f"rank {rank} raised {text}" for rank, text in enumerate(errors) if text), "")
        return (None, found) if found else (done, "")

    def _updated(
        self, model: nn.Module, before: list[Local], step: StepResult, *, is_compared: bool
    ) -> tuple[list[Local], list[Local]]:
        """Let the optimizer step. A probe without an optimizer gets Adam, and only Adam's state is kept.

        Returns:
            The tensors with the gradients to check; and the optimizer's state with the updated weights.
        """
        if not hasattr(self.probe, "optimizer"):
            return before, adam_states(model, before)
        before = copied_gradients(before)
        own, failed = self._attempt("optimizer", lambda: updated(self.probe, model, self.device_mesh, step.seen))
        if own is None:
            if is_compared:
                self.capture.raised.append(("optimizer", failed))
            else:
                alone = ("", f"the optimizer of the unsharded model: {failed}")
                self.capture.not_checked = [note for note in self.capture.not_checked if note != alone]
                self.capture.not_checked.append(("", f"the optimizer: {failed}"))
            return before, []
        after = list(local_tensors(unwrapped(model), self.job.mesh))
        update = update_of(own, unwrapped(model), before, after)
        self.capture.not_checked += [("", why) for why in update.not_checked]
        self.capture.not_stepped += update.not_stepped
        return distinct_gradients(before, after), update.tensors

    def _add_step(
        self, model: nn.Module, step: StepResult, reference: StepResult, axes: Mapping[str, int], *, is_compared: bool
    ) -> None:
        """Record a sharded step: its gradients, optimizer state, outputs and collectives."""
        own = self.part.own(local_tensors(unwrapped(model), self.job.mesh))
        kept = {id(param) for param in held_back(unwrapped(model))}
        named = unwrapped(model).named_parameters()
        self.capture.held_back += [clean_name(name) for name, param in named if id(param) in kept]
        locals_, of_optimizer = self._updated(model, own, step, is_compared=is_compared)
        if step.output is not None and step.runs != reference.runs:
            times = f"{step.runs} times per step, but the unsharded model ran {reference.runs} times"
            why = f"the output: the model ran {times}"
            self.capture.not_checked.append(("", why))
            step = replace(step, output=None)
        elif step.output is not None and reference.output is not None:
            own_shape, whole = tuple(step.output.shape), tuple(reference.output.shape)
            if why := merged_dims(own_shape, whole, step.sizes, num_parts(axes, self.job.mesh)):
                self.capture.not_checked.append(("", why))
                step = replace(step, output=None)
        rank, seen = self.capture.rank, step.seen.activations
        activations = placing.placed(seen, reference.seen.activations, self.job.mesh, rank)
        for local in placing.wholes_of_odd(activations, reference.seen.activations) if rank == 0 else ():
            self.capture.add_values(local, "reference")
        buffers = [local for local in own if local.role == "buffer"]
        of_step = [*gradients(locals_), *self.part.own([*of_optimizer, *activations]), *buffers]
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
        """Let a probe fill a model that it shards before it has values; stamped weights are left as they are."""
        if hasattr(self.probe, "initialize"):
            self.probe.initialize(model, self.device_mesh)
        return model
