"""The training step of a probe on this rank: unsharded, sharded, and what is captured of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from shardviz.dump.records.step import WHOLE_LOSS, RaisedRecord
from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import agreed_errors, attempted, in_a_line
from shardviz.live.claims.registry import held_back_names, local_tensors, of_tensor, unwrapped
from shardviz.live.claims.wrappers import reducing
from shardviz.live.compat.fsdp import wide_reductions
from shardviz.live.compat.modules import computed_buffers
from shardviz.live.compat.worlds import mesh_of_one_rank, one_process
from shardviz.live.lines.rerun import Again, Side, differ
from shardviz.live.step.batch import Setting, axes_of_one_batch, batch_axes, num_parts, own_batch, row_axes, whole_batch
from shardviz.live.step.judge import judging, weight_sketches
from shardviz.live.step.observe import Mask, Masks, mask_records
from shardviz.live.step.output_parts import merged_dims
from shardviz.live.step.outputs import add_outputs, outputs_again
from shardviz.live.step.read_buffers import read_buffers
from shardviz.live.step.step import calls, gradients, has_last_stage, loss_of, results, sharded_step, stages_of
from shardviz.live.step.unsharded.by_parts import gradients_of_loss_terms, gradients_of_micro_batches, micro_batches
from shardviz.live.step.unsharded.late_weights import drawn_after_sharding, load
from shardviz.live.step.unsharded.probe_loss import with_own_loss
from shardviz.live.step.unsharded.step import add_replayed, noise_of, reference_of, stepped
from shardviz.live.step.update import copied_gradients, updated_reference, updated_shards
from shardviz.live.trace_modules import NONE, Followed
from shardviz.relate.tolerance import ROUNDINGS_OF_STEP, SINGLE
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.agreement import Raised
    from shardviz.live.claims.local import Local
    from shardviz.live.lines.step_recorder import StepRecorder
    from shardviz.live.probe import ProbeOnRank
    from shardviz.live.step.batch import Batch
    from shardviz.live.step.judge import Judge
    from shardviz.live.step.step import StepResult
    from shardviz.live.step.unsharded.step import UnshardedStep
    from shardviz.live.step.update import UpdatedReference

MAX_LISTED = 4
SEED = 2
"""What every rank is seeded with before a step."""
FIRST_SEED = 1000
"""Where each rank is seeded differently, rank 0 begins with this."""
MACHINE = (
    "CUDA driver version is insufficient",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Torch not compiled with CUDA enabled",
    "Cannot access accelerator device when none is available",
    "Cannot use ReduceOp.AVG with Gloo",
    "out of memory",
)
"""What exceptions say that are of the machine: the model's code is not at fault."""
OF_DTYPE = ("dtype", "Float", "Double", "Half", "float64", "float16", "float8", "bf16", "BF16", "fp16", "fp32")
"""What exceptions say that are of the dtype: the step in another one may run."""
WITHOUT_LOSS = (
    "; the probe has a step and no loss(model, batch), so the unsharded model's step is the mean square of "
    "model(batch): define loss"
)
DRAWN = (
    "drawn or loaded in parallelize() or initialize(), not in build(): the unsharded model's step starts from these "
    "values, put together as their placements say, and whether they are the intended ones is not known"
)


@dataclass(frozen=True)
class Failed:
    """Why a step could not be compared.

    Attributes:
        text: Who raised what, in a line.
        module: The module in whose forward the sharded model raised it, if that is known.
        unsharded: The exception, if the unsharded model raised it.
        is_everywhere: Whether it did so on every rank, so that there is no step to compare with.
        is_out_of_step: Whether ranks raised differently, so that their collectives no longer fit together.
    """

    text: str
    module: str = ""
    unsharded: Exception | None = None
    is_everywhere: bool = False
    is_out_of_step: bool = False


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """One step of a probe on one rank."""

    on: ProbeOnRank

    def capture_step(self) -> None:
        """Step the unsharded model and then the sharded one, and capture both.

        Both in float64, where rounding hides nothing; if that raises, as it does for kernels that want bfloat16,
        both again in their own dtypes.
        """
        failed = self._step(double=True)
        if failed is None:
            return
        again = failed if failed.is_out_of_step else self._step(double=False)
        if again is None:
            why = f"the step in float64: {failed.text}; compared in the model's own dtypes"
            self.on.capture.not_checked.append(("", why))
        elif again.is_everywhere:
            alone = hasattr(self.on.probe, "step") and not hasattr(self.on.probe, "loss")
            self._note(f"the step: {again.text}{WITHOUT_LOSS if alone else ''}")
        elif again.unsharded is not None:
            raise again.unsharded
        elif any(words in again.text for words in MACHINE):
            self._note(f"the step: this machine cannot run it: {again.text}")
        else:
            self.on.capture.raised.append(RaisedRecord("step", again.text, again.module))

    def _step(self, *, double: bool) -> Failed | None:
        """Step both models and capture them; return why that cannot be."""

        def built() -> nn.Module:
            return self.on.built().double() if double else self.on.built()

        model = self.on.initialized(self.on.parallelized(built()))
        drawn = drawn_after_sharding(model, built(), self.on.job.mesh, self.on.capture.rank)
        setting = self._setting(lambda: load(built(), drawn), double=double)
        reference = self._unsharded(setting, "reference" if double else "reference again")
        if isinstance(reference, Failed):
            return reference
        if reference.draws:
            self._note(*reference.notes)
            return None
        if drawn:
            self._note(f"{listed(drawn, MAX_LISTED)}: {DRAWN}")
        model = reference.mode(model)
        local_batch = own_batch(setting.batch, setting.axes, self.on.device_mesh)
        tensors = self._tensors(model) if self.on.job.keeps_evidence else []
        before = [replace(local, values=local.values.clone(), grad=None) for local in tensors]
        step, failed = self._sharded_step(
            model, local_batch, "step" if double else "step again", followed=self.on.job.followed
        )
        if step is None:
            is_of_dtype = any(word in failed.text for word in OF_DTYPE)
            return Failed(failed.text, failed.module, is_out_of_step=not (failed.is_alike or is_of_dtype))
        with judging(self.on, step, before, partial(self._tensors, model)) as judge:
            groups = [self.on.job.mesh.group_of(self.on.capture.rank, axis) for axis in setting.axes]
            reference = reference.compared_with(step, judge.answer, groups).in_turns_of(step)
            reference = with_own_loss(self.on.probe, step, reference, judge.answer)
            self._note(*reference.notes)
            if reference.is_called_otherwise:
                return None
            moved = reference.once_more(step, self.on.probe, setting)
            reference = replace(reference, moved=moved).clipped(step, self.on.probe, setting.batch)
            answer = judge.answer(reference)
            judge.add_answer(answer, reference)
            judge.add_activations(answer, reference)
            self._add_of_unsharded(judge, reference, drawn)
        self._note(
            *(why for one in (step.observation.trace, reference.step.observation.trace) if (why := one.left_out))
        )
        held, differs, is_alone = self._compare(model, step, reference, setting)
        if answer.wrong or differs:
            by_calls = micro_batches(step, reference, setting)
            self.on.again = self._again(built, local_batch, setting, reference, by_calls, is_alone=is_alone)
        if not reference.training:
            self._add_training(local_batch, setting.axes, reference, built, held)
            self._add_masks(local_batch, setting.batch, built)
        return None

    def _again(
        self,
        built: Callable[[], nn.Module],
        local_batch: Batch,
        setting: Setting,
        reference: UnshardedStep,
        by_calls: tuple[Batch, int] | None,
        *,
        is_alone: bool,
    ) -> Again:
        """Return what runs both steps once more, from the same weights and the same seeds."""
        probe, alone = self.on.probe, mesh_of_one_rank(self.on.device_mesh)
        batch, parts = by_calls or (setting.batch, 1)
        is_of_parts = reference.parts > 1 and not reference.is_mean_of_means

        @one_process()
        def built_alone() -> nn.Module:
            return reference.mode(self.on.initialized(self.on.parallelized(built(), alone), alone))

        @one_process()
        def step_alone(model: nn.Module, recorded: Any) -> str:
            sharded_step(recorded, model, batch if parts == 1 else setting.batch, alone)
            return ""

        @one_process()
        def update_alone(model: nn.Module, recorder: StepRecorder) -> str:
            return self._stepped(model, recorder, alone)

        def update(model: nn.Module, recorder: StepRecorder) -> str:
            _, failed = attempted(lambda: self._stepped(model, recorder, self.on.device_mesh), "lines of the optimizer")
            return failed.text

        def step_unsharded(model: nn.Module, recorded: Any) -> str:
            stepped(recorded, model, batch if parts == 1 else setting.batch)
            return ""

        def call_unsharded(model: nn.Module, recorded: Any) -> str:
            stepped(recorded, model, batch, parts)
            return ""

        def side(build: Callable[[], nn.Module], step: Callable[[nn.Module, Any], str], update: Any) -> Side:
            return Side(build, step, update if hasattr(probe, "optimizer") else None)

        return Again(
            probe,
            side(
                lambda: reference.mode(self.on.initialized(self.on.parallelized(built()))),
                lambda model, recorded: self._sharded_step(model, local_batch, "lines", probe=recorded)[1].text,
                update,
            ),
            side(lambda: reference.mode(setting.build()), step_unsharded, update_alone if is_alone else update),
            side(built_alone, step_alone, update_alone),
            not reference.has_own_loss,
            is_of_parts=by_calls is None and reference.turns > 1,
            by_calls=None if by_calls is None else call_unsharded,
            is_beside_parts=is_of_parts,
        )

    def _stepped(self, model: nn.Module, recorder: StepRecorder, mesh: DeviceMesh) -> str:
        """Let the probe's optimizer step a model, with its lines recorded."""
        optimizer = self.on.probe.optimizer(model, mesh)
        recorder.on(optimizer.step)()
        recorder.end_update(optimizer)
        return ""

    def _tensors(self, model: nn.Module) -> list[Local]:
        return self.on.part.of_stage(local_tensors(unwrapped(model), self.on.job.mesh))

    def _add_of_unsharded(self, judge: Judge, reference: UnshardedStep, drawn: Collection[str]) -> None:
        """Record, on rank 0, what the unsharded step says for itself: sketches, replayed gradients, noise."""
        capture, moved = self.on.capture, reference.moved
        if capture.rank or judge.judge is None:
            return
        capture.sketches += weight_sketches(reference, drawn)
        capture.sketches += judge.judge.sketches()
        if moved is not None:
            add_replayed(capture, judge.judge, reference)
            capture.noise += noise_of(reference, moved)

    def _setting(self, build: Callable[[], nn.Module], *, double: bool) -> Setting:
        axes = batch_axes(self.on.probe, self.on.job.mesh)
        rows = row_axes(axes)
        parts = self.on.job.mesh.size_over(rows)
        batch = whole_batch(self.on.probe, axes, self.on.job.mesh, double=double)
        return Setting(build, axes, batch, parts, axes[rows[0]] if rows else 0)

    def _unsharded(self, setting: Setting, what: str) -> UnshardedStep | Failed:
        """Step the unsharded model; return why not if it raises on any rank."""
        failure, reference = None, None
        try:
            reference = reference_of(self.on.probe, setting, self.on.job.followed)
        except ProbeError:
            raise
        except Exception as error:
            failure = error
        texts = [raised.text for raised in agreed_errors(failure, what)]
        if failure is not None and not all(texts):
            why = f"the unsharded model, which each rank runs alone, raised {in_a_line(failure)}, and not on all ranks"
            hint = "use what depends on the rank only if dist.get_world_size() > 1: the unsharded model runs alone"
            raise ProbeError(why, hint) from failure
        if any(texts) or reference is None:
            return Failed(
                f"the unsharded model raised {next(filter(None, texts))}", unsharded=failure, is_everywhere=all(texts)
            )
        return reference

    def _compare(
        self, model: nn.Module, step: StepResult, reference: UnshardedStep, setting: Setting
    ) -> tuple[list[Local], bool, bool]:
        """Capture both steps with their updated weights.

        Returns:
            The outputs besides one tensor; whether the loss, a gradient or a weight may differ on any rank; and whether
            the optimizer stepped the unsharded model as in a job of one process.
        """
        probe, capture, mesh = self.on.probe, self.on.capture, self.on.job.mesh
        if axes := axes_of_one_batch(probe, mesh, step.observation.outputs):
            over = ", ".join(axes)
            line = f"BATCH_AXES = {tuple(axes)} splits its rows"
            self._note(f"reductions over {over}: every rank saw the same batch; in the probe, {line}")
        unsharded = copied_gradients(list(local_tensors(reference.model)))
        of_parts = gradients_of_micro_batches(probe, setting, step, reference)
        if capture.rank == 0:
            of_parts += gradients_of_loss_terms(probe, setting, reference)
        updated = updated_reference(self.on, reference)
        of_step = self._add_step(model, step, reference.step, setting.axes, updated)
        held = add_outputs(self.on, step, reference, setting)
        if capture.rank == 0:
            after = [*gradients(unsharded), *results(reference.step, mesh, {})]
            if reference.is_mean_of_means and reference.whole is not None:
                after.append(of_tensor(WHOLE_LOSS, "scalar", reference.whole.step.loss))
            after = [one for one in after if one.role == "output" or not reference.has_own_loss]
            for local in [*reference.before, *after]:
                capture.add_values(replace(local, claim=None), "reference")
            for local in updated.tensors:
                capture.add_values(replace(local, claim=None, grad=None), "updated")
            for local in of_parts:
                capture.add_values(replace(local, claim=None), "reference")
        capture.read_buffers += read_buffers(probe, reference.model, reference.before, setting.batch)
        whole = reference.whole or reference
        wanted = [*gradients(unsharded), *(replace(local, claim=None, grad=None) for local in updated.tensors)]
        near = max(SINGLE, ROUNDINGS_OF_STEP * reference.precision)
        differs = differ(of_step, wanted, (step.loss, whole.step.loss), capture.rank, near)
        return held, differs, updated.is_alone

    def _note(self, *notes: str) -> None:
        self.on.capture.not_checked += [("", note) for note in notes]

    def _add_training(
        self,
        local_batch: Batch,
        axes: Mapping[str, int],
        reference: UnshardedStep,
        built: Callable[[], nn.Module],
        held: Sequence[Local],
    ) -> None:
        """Record a step of a model that draws random numbers as it trains: its copies, at least, must be equal.

        A rank that is seeded as the model is sharded draws from that seed, as in the job.
        """
        model = built()
        before = torch.initial_seed()
        model = self.on.initialized(self.on.parallelized(model))
        seed = torch.initial_seed() if torch.initial_seed() != before else SEED
        step, failed = self._sharded_step(model, local_batch, "training", seed)
        if step is None:
            self.on.capture.not_checked.append(("", f"the step in training mode: {failed.text}"))
            return
        of_step = gradients(self.on.part.of_stage(local_tensors(unwrapped(model), self.on.job.mesh)))
        of_step += results(replace(step, logged={}), self.on.job.mesh, axes, reference.step.output)
        for local in [*of_step, *outputs_again(held, step, reference)]:
            self.on.capture.add_values(local, "training")

    def _add_masks(self, local_batch: Batch, batch: Batch, built: Callable[[], nn.Module]) -> None:
        """Record the masks that ranks draw, seeded alike and seeded differently, and the unsharded model's."""
        drawn: list[list[Mask]] = []
        for what, seed in (("masks", SEED), ("masks again", FIRST_SEED + self.on.capture.rank)):
            with Masks() as masks:
                step, _ = self._sharded_step(
                    self.on.initialized(self.on.parallelized(built())), local_batch, what, seed
                )
            if step is None:
                return
            drawn.append(masks.masks)
        with Masks() as whole, one_process():
            loss_of(self.on.probe, built(), batch)
        self.on.capture.masks += mask_records(drawn[0], drawn[1], whole.masks)

    def _sharded_step(
        self,
        model: nn.Module,
        local_batch: Batch,
        what: str,
        seed: int = SEED,
        followed: Followed = NONE,
        probe: Any = None,
    ) -> tuple[StepResult | None, Raised]:
        """Step the sharded model; return None and the first error if any rank raised one."""
        probe, mesh = probe or self.on.probe, self.on.device_mesh
        stages, failed = attempted(lambda: stages_of(probe, model, mesh), f"{what} stages")
        if stages is None:
            return None, failed
        self.on.capture.stages = sorted(stages)
        has_output = has_last_stage(probe, stages, mesh)
        return attempted(
            lambda: sharded_step(
                probe, model, local_batch, mesh, stages, has_output=has_output, seed=seed, followed=followed
            ),
            what,
        )

    def _add_step(
        self,
        model: nn.Module,
        step: StepResult,
        reference: StepResult,
        axes: Mapping[str, int],
        updated: UpdatedReference,
    ) -> list[Local]:
        """Record a sharded step: its gradients, optimizer state, outputs and collectives.

        Returns:
            The gradients and the optimizer's results.
        """
        capture, mesh, comms = self.on.capture, self.on.job.mesh, step.observation.comms
        tensors = self.on.part.of_stage(local_tensors(unwrapped(model), mesh))
        capture.wrappers = reducing(step.observation.around or model, self.on.part.prefix)
        capture.held_back += held_back_names(unwrapped(model))
        locals_, of_optimizer = updated_shards(self.on, model, tensors, step, updated)
        if step.output is not None and step.runs != reference.runs:
            times = f"{step.runs} times per step, but the unsharded model ran {reference.runs} times"
            why = f"the output: the model ran {times}"
            capture.not_checked.append(("", why))
            step = replace(step, output=None)
        elif step.output is not None and reference.output is not None:
            own_shape, whole = tuple(step.output.shape), tuple(reference.output.shape)
            if why := merged_dims(own_shape, whole, step.sizes, num_parts(axes, mesh)):
                capture.not_checked.append(("", why))
                step = replace(step, output=None)
        buffers = [local for local in tensors if local.role == "buffer"]
        capture.not_saved += sorted(computed_buffers(unwrapped(model)))
        of_step = [*gradients(list(capture.in_parts(locals_))), *self.on.part.of_stage(of_optimizer), *buffers]
        for local in [*of_step, *results(step, mesh, axes, reference.output)]:
            capture.add_values(local, "step")
        capture.collectives += comms.records(mesh, capture.rank)
        capture.moves += dict.fromkeys(comms.moves)
        capture.casts += comms.casts
        if capture.rank == 0:
            capture.casts += [structs.replace(cast, unsharded=True) for cast in reference.observation.comms.casts]
        capture.reductions += comms.reductions(mesh, capture.rank)
        capture.unread += comms.unread_records(mesh, capture.rank, unwrapped(model))
        capture.narrowed_to |= comms.narrowed_to | reference.observation.comms.narrowed_to
        wide = max((dtype.itemsize for dtype in wide_reductions(unwrapped(model))), default=0)
        capture.narrow_sums |= {dtype for dtype in comms.summed_in if dtype.itemsize < wide}
        capture.schedule += step.observation.schedule
        capture.runs = len(step.observation.returned)
        capture.is_own_step = hasattr(self.on.probe, "step")
        capture.calls += calls(self.on.probe, model, self.on.device_mesh)
        return of_step
