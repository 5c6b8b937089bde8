"""Write ranks' values of a step, and ask the judge how they relate to the unsharded model's.

Ranks judge nothing. Each writes its raw values as a trace, as `shardviz run --trace` does; rank 0 writes those of the
unsharded step as a job's on one rank, has both judged while the others wait, and tells them the answer. The values are
removed again, unless the job keeps them: then `shardviz diff DUMP/unsharded DUMP` judges them once more.
"""

from __future__ import annotations

import importlib
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shardviz.dump.arrays import sketch
from shardviz.dump.records.trace import Place, PointRecord, SketchRecord, StepAnswer
from shardviz.dump.write import (
    MOVED_FOLDER,
    TRACE_FOLDER,
    UNSHARDED_FOLDER,
    dense_file,
    rank_file,
    write_rank,
    write_run,
)
from shardviz.live.capture.agreement import attempted, of_all_ranks
from shardviz.live.capture.capture import Capture, run_record
from shardviz.live.capture.stamp import dtype_name
from shardviz.live.claims.local import Local
from shardviz.live.claims.registry import local_tensors
from shardviz.live.run.step_files import groups_of
from shardviz.live.step.module_recorder import add_points
from shardviz.live.step.step import gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from shardviz.check.step.trace.step_judge import StepJudge
    from shardviz.live.probe import ProbeOnRank
    from shardviz.live.step.module_recorder import Trace
    from shardviz.live.step.step import StepResult
    from shardviz.live.step.unsharded.step import UnshardedStep

JUDGE = "shardviz.check.step.trace.step_judge:judge"
"""The judge: it imports no torch, and is not imported here."""

MAX_WHOLE = 1 << 20
"""Of the unsharded model's activations that no placements fit, as many as these elements are written down."""


@contextmanager
def judging(
    on: ProbeOnRank, step: StepResult, before: Sequence[Local], after: Callable[[], Sequence[Local]]
) -> Iterator[Judge]:
    """Write this rank's values of the sharded step, and yield its judge. Every rank calls this.

    Args:
        before: This rank's tensors before the step, if the values are kept.
        after: Returns the same after it, with their gradients.
    """
    folder, capture = on.job.folder, on.capture
    try:
        step_capture = Capture(capture.rank, capture.num_ranks, run_id=capture.run_id)
        for name, ranks in groups_of(capture.num_ranks):
            step_capture.add_group(name, ranks)
        step_capture.narrowed_to |= step.observation.comms.narrowed_to
        _write(folder, step_capture, step.observation.trace, _weights(before, after()) if on.job.keeps_evidence else ())
        _bring_together(folder / TRACE_FOLDER, capture.rank, capture.num_ranks)
        yield Judge(on, step)
    finally:
        if not on.job.keeps_evidence:
            shutil.rmtree(folder / TRACE_FOLDER, ignore_errors=True)
            shutil.rmtree(folder / UNSHARDED_FOLDER, ignore_errors=True)


@dataclass
class Judge:
    """Judges a sharded step beside the unsharded model's.

    Attributes:
        judge: On rank 0, what judged it last; None on all others.
        num_asked: How often it was asked.
    """

    on: ProbeOnRank
    step: StepResult
    judge: StepJudge | None = None
    num_asked: int = 0

    def answer(self, reference: UnshardedStep) -> StepAnswer:
        """Judge all ranks' values by a reference's. Every rank calls this."""
        self.num_asked += 1
        answer, why = attempted(lambda: self._answer(reference), f"judging {self.num_asked}")
        if why.text:
            self.on.capture.not_checked.append(("", f"the step's modules: {why.text}"))
        return of_all_ranks(answer)[0] or StepAnswer({}, (), {})

    def _answer(self, reference: UnshardedStep) -> StepAnswer | None:
        """Ask the judge, on rank 0."""
        if self.on.capture.rank:
            return None
        whole = self.on.job.folder / UNSHARDED_FOLDER
        shutil.rmtree(whole, ignore_errors=True)
        self._write_unsharded(whole, reference)
        module, _, name = JUDGE.partition(":")
        judge: StepJudge = getattr(importlib.import_module(module), name)(
            self.on.job.folder,
            whole,
            self.on.job.mesh,
            counts={name: reference.num_calls(name) for name in reference.step.observation.trace.calls},
            dim=reference.dim,
            is_pipeline=bool(getattr(self.on.probe, "STAGE_AXES", ())),
            is_forward=reference.has_own_loss,
        )
        self.judge = judge
        return judge.answer()

    def _write_unsharded(self, folder: Path, reference: UnshardedStep) -> None:
        """Write the unsharded model's values of its step."""
        run_id, keeps = self.on.capture.run_id, self.on.job.keeps_evidence
        step_capture, job = (Capture(0, 1, run_id=run_id) for _ in range(2))
        step_capture.narrowed_to |= reference.narrowed_to
        weights = _weights(reference.before, list(local_tensors(reference.model))) if keeps else ()
        _write(folder, step_capture, reference.step.observation.trace, weights)
        write_run(folder, run_record(1, None, run_id=run_id))
        write_rank(folder, job.record(), job.dense)
        if reference.moved is not None:
            _write(folder / MOVED_FOLDER, Capture(0, 1, run_id=run_id), reference.moved.step.observation.trace)

    def add_answer(self, answer: StepAnswer, reference: UnshardedStep) -> None:
        """Record this rank's judgments at every place, with the values of the first wrong ones."""
        capture, points = self.on.capture, self._points(answer)
        capture.trace += points.values()
        capture.arguments += answer.arguments.get(capture.rank, ())
        for place in answer.wrong:
            whole = values_at(reference.step.observation.trace, place, reference.num_calls(place.module), reference.dim)
            values = (
                values_at(self.step.observation.trace, place, reference.num_calls(place.module))
                if place in points
                else None
            )
            if whole is None:
                continue
            local = Local(place.values_name, "activation", tuple(whole.shape), whole)
            if values is not None:
                capture.add_values(replace(local, values=values / points[place].scale), "step")
            if capture.rank == 0:
                capture.add_values(local, "reference")

    def add_activations(self, answer: StepAnswer, reference: UnshardedStep) -> None:
        """Record the first output of every module, with the placements that it has by value if it claims none.

        Rank 0 also records the unsharded model's of those that no placements fit, the first of them.
        """
        outputs, points, elements = [], self._points(answer), 0
        for local in outputs_in(self.step.observation.trace):
            place, count = Place(local.name, 0, "output", 0), reference.num_calls(local.name)
            whole = values_at(reference.step.observation.trace, place, count, reference.dim) if count else None
            is_first_part = len(self.step.observation.trace.calls[local.name]) != count
            if is_first_part and count and not hasattr(self.on.probe, "STAGE_AXES"):
                joined = values_at(self.step.observation.trace, place, count)
                is_first_part = joined is None
                local = local if joined is None else replace(local, values=joined, claim=None)
            if whole is None or (local.claim is not None and local.shape == whole.shape):
                outputs.append(local)
                continue
            placements = None if is_first_part else answer.layouts.get(place)
            if placements is not None:
                outputs.append(replace(local, shape=tuple(whole.shape), claim=(self.on.job.mesh, placements)))
            elif local.claim is not None:
                outputs.append(local)
            elif place in points:
                outputs.append(replace(local, shape=tuple(whole.shape)))
                elements += whole.numel()
                if self.on.capture.rank == 0 and elements <= MAX_WHOLE:
                    unsharded = Local(local.name, "activation", tuple(whole.shape), whole)
                    self.on.capture.add_values(unsharded, "reference")
        for local in self.on.part.of_stage(outputs):
            self.on.capture.add_values(local, "step")

    def _points(self, answer: StepAnswer) -> dict[Place, PointRecord]:
        of_rank = answer.points.get(self.on.capture.rank, ())
        return {Place(point.module, point.call, point.what, point.index): point for point in of_rank}


def outputs_in(trace: Trace) -> Iterator[Local]:
    """Yield each module's first output, if it is one tensor, with its claimed placements."""
    for name in (name for name in dict.fromkeys(trace.order) if name):
        call = trace.calls[name][0]
        output = call.outputs[0] if call.is_tensor and call.outputs else None
        if output is not None and output.local is not None:
            yield replace(output.local, name=name)


def values_at(trace: Trace, place: Place, count: int, dim: int = 0) -> torch.Tensor | None:
    """Return a trace's values at a place, micro-batches joined; None if some are missing.

    Args:
        count: How often its module is called in one forward of the whole batch.
    """
    calls = trace.calls[place.module][place.call :: count]
    sides = [call.inputs if place.what.endswith("input") else call.outputs for call in calls]
    tensors = [side[place.tensor] for side in sides if len(side) > place.tensor]
    parts = [tensor.gradient if place.is_gradient else tensor.values for tensor in tensors]
    present = [part for part in parts if part is not None]
    if len(present) < len(calls) or len(calls) < 2:
        return present[0] if present and len(calls) == 1 else None
    return torch.cat(present, dim)


def weight_sketches(reference: UnshardedStep, drawn: Collection[str]) -> Iterator[SketchRecord]:
    """Yield the unsharded model's weights in few numbers.

    Args:
        drawn: The weights that were drawn after sharding.
    """
    for local in reference.before:
        if local.role == "param" and local.values.is_floating_point():
            numbers = sketch(local.values.detach().double().cpu().numpy())
            dtype = dtype_name(local.values.dtype)
            yield SketchRecord(local.name, "weight", dtype, local.shape, numbers, is_drawn=local.name in drawn)


def _weights(before: Sequence[Local], after: Sequence[Local]) -> list[Local]:
    return [*(replace(local, grad=None) for local in before if local.role == "param"), *gradients(after)]


def _write(folder: Path, step_capture: Capture, trace: Trace, weights: Sequence[Local] = ()) -> None:
    for local in weights:
        step_capture.add_values(local, "step")
    add_points(step_capture, trace)
    traced = folder / TRACE_FOLDER
    traced.mkdir(parents=True, exist_ok=True)
    if step_capture.rank == 0:
        write_run(traced, run_record(step_capture.num_ranks, None, run_id=step_capture.run_id))
    write_rank(traced, step_capture.record(), step_capture.dense)


def _bring_together(folder: Path, rank: int, num_ranks: int) -> None:
    """Give rank 0 the files that it does not see: ranks of other machines may have a disk of their own."""
    of_all_ranks(None)  # all have written
    there = [other for other in range(num_ranks) if (folder / rank_file(other)).exists()] if rank == 0 else None
    if len(there := of_all_ranks(there)[0] or []) == num_ranks:
        return
    files = [folder / name for name in (rank_file(rank), dense_file(rank)) if rank not in there]
    for sent in of_all_ranks({file.name: file.read_bytes() for file in files if file.exists()}):
        for name, content in sent.items() if rank == 0 else ():
            (folder / name).write_bytes(content)
