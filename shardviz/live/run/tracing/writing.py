"""Writes what a rank saw of a step: its part of the weights, of every activation and of every gradient, as a dump."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from torch import distributed

from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RunRecord
from shardviz.dump.write import write_rank, write_run
from shardviz.layout.mesh import AXIS_NAME
from shardviz.live.capture.capture import Capture
from shardviz.live.capture.locals import Local, local_tensors, unwrapped
from shardviz.live.compat import default_store, groups_here
from shardviz.live.run.known.writing import is_first_here, rank_here
from shardviz.live.run.tracing.recording import sampled
from shardviz.live.step.trace.points import add_points

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from shardviz.live.run.tracing.recording import JobTrace


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is being followed.

    Attributes:
        root: The model as the job calls it.
        trace: What its modules were given and returned.
        number: Which optimizer step it is, counted from 1.
        most: Of each weight and its gradient no more elements are kept.
        weights: This rank's part of the weights before the step.
        broke_off: Whether the job raised in it: what backward left in gradients may not be reduced yet.
    """

    root: nn.Module
    trace: JobTrace
    number: int
    most: int
    weights: Sequence[Local]
    broke_off: bool = False


def weights_of(tensors: Iterable[Local], most: int) -> list[Local]:
    """Return copies of a model's parameters, of large ones a sample."""
    return [
        replace(local, values=sampled(local.values, most), grad=None)
        for local in tensors
        if local.role == "param" and not local.values.is_meta
    ]


def write_step(step: Step, folder: Path, command: tuple[str, ...], problem: str = "") -> None:
    """Write this rank's file, and on the first rank of each disk that of the run.

    Args:
        step: What was seen.
        folder: Where to; it is made.
        command: The job's, for the record.
        problem: Why the step has no end; empty where it has one.
    """
    rank, num_ranks = _place()
    seen = Capture(rank, num_ranks, run_id=_run_id())
    for local in (*step.weights, *(() if step.broke_off else _gradients(step))):
        seen.add_values(local, "step")
    add_points(seen, step.trace)
    for name, ranks in groups_of(num_ranks):
        seen.add_group(name, ranks)
    if problem:
        unseen = "the end of the step and the gradients of weights" if step.broke_off else "the end of the step"
        seen.not_checked.append(("", f"{unseen}: {problem}"))
    if step.trace.left_out:
        seen.not_checked.append(("", step.trace.left_out))
    folder.mkdir(exist_ok=True)
    if is_first_here(folder, "trace folder"):
        write_run(
            folder, RunRecord(SCHEMA, version("shardviz"), version("torch"), num_ranks, command, run_id=seen.run_id)
        )
    write_rank(folder, seen.record(), seen.dense)


def _place() -> tuple[int, int]:
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (rank_here(), 1)


def groups_of(num_ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the groups of this rank that are smaller than the job, each with the name of an axis."""
    for name, ranks in groups_here() if distributed.is_initialized() else ():
        axis = name.removeprefix("mesh_")
        if len(ranks) < num_ranks:
            yield axis if AXIS_NAME.fullmatch(axis) and axis != "undefined" else f"groups_of_{len(ranks)}", ranks


def _run_id() -> str:
    """Return what names the run in all of its files: what the first rank that asks puts into the job's store."""
    own = secrets.token_hex(8)
    if distributed.is_initialized():
        with suppress(RuntimeError):
            return str(default_store().compare_set("shardviz/trace", "", own).decode())
    return own


def _gradients(step: Step) -> Iterator[Local]:
    for local in local_tensors(unwrapped(step.root)):
        if local.role == "param" and local.grad is not None:
            claim = local.grad_claim or local.claim
            values = sampled(local.grad.detach(), step.most)
            yield replace(local, role="grad", values=values, grad=None, claim=claim)
