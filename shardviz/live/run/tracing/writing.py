"""Writes what a rank saw of a step: its part of the weights, of every activation and of every gradient, as a dump."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from msgspec import structs
from torch import distributed

from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RunRecord
from shardviz.dump.records.trace import KeptRecord, of_point
from shardviz.dump.write import write_rank, write_run
from shardviz.layout.mesh import AXIS_NAME
from shardviz.live.capture.capture import Capture
from shardviz.live.capture.locals import Local, local_tensors, unwrapped
from shardviz.live.compat import default_store, groups_here
from shardviz.live.run.known.writing import rank_here
from shardviz.live.run.tracing.recording import sampled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from shardviz.dump.records.trace import What
    from shardviz.live.run.tracing.recording import JobTrace
    from shardviz.live.step.trace.recorded import Call, Seen


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
    """Write this rank's file, and on rank 0 that of the run.

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
    _add_points(seen, step.trace)
    for name, ranks in _groups(num_ranks):
        seen.add_group(name, ranks)
    if problem:
        unseen = "the end of the step and the gradients of weights" if step.broke_off else "the end of the step"
        seen.not_checked.append(("", f"{unseen}: {problem}"))
    if step.trace.left_out:
        seen.not_checked.append(("", step.trace.left_out))
    folder.mkdir(exist_ok=True)
    if rank == 0:
        write_run(
            folder, RunRecord(SCHEMA, version("shardviz"), version("torch"), num_ranks, command, run_id=seen.run_id)
        )
    write_rank(folder, seen.record(), seen.dense)


def _place() -> tuple[int, int]:
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (rank_here(), 1)


def _groups(num_ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the groups of this rank that are not the whole job, each with the name of an axis."""
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


def _add_points(seen: Capture, trace: JobTrace) -> None:
    names: dict[int, str] = {}
    sides: tuple[tuple[What, What], ...] = (("input", "gradient of input"), ("output", "gradient of output"))
    for order, (name, number, call) in enumerate(_in_order(trace)):
        draws = trace.draws[name][number : number + 1] == [True]
        record = KeptRecord(name, "input", order, number, type=trace.types.get(name, ""), draws=draws)
        for side, tensors in zip(sides, (call.inputs, call.outputs), strict=True):
            for index, one in enumerate(tensors):
                own = structs.replace(record, index=index, tensor=max(one.number, 0), needs_grad=one.needs_grad)
                _add(seen, names, structs.replace(own, what=side[0]), (one, one.values, 0))
                _add(seen, names, structs.replace(own, what=side[1]), (one, one.gradient, 1))
    for number, given in enumerate(trace.given):
        for index, (shape, values) in enumerate(given):
            seen.kept.append(KeptRecord("", "batch", 0, number, index))
            seen.add_values(Local(of_point("", "batch", number, index), "activation", shape, values), "step")


def _in_order(trace: JobTrace) -> Iterator[tuple[str, int, Call]]:
    """Yield the calls of a step as they ended, each with its number among those of its module."""
    done: dict[str, int] = {}
    for name in trace.order:
        number = done.get(name, 0)
        done[name] = number + 1
        yield name, number, trace.calls[name][number]


def _add(
    seen: Capture, names: dict[int, str], record: KeptRecord, found: tuple[Seen, torch.Tensor | None, int]
) -> None:
    """Record a tensor, or its gradient, at a place; its values once, however many modules it goes through."""
    one, values, is_gradient = found
    name = of_point(record.module, record.what, record.call, record.index)
    known = names.setdefault(2 * id(one) + is_gradient, name)
    seen.kept.append(structs.replace(record, same_as=known if known != name else ""))
    if values is not None and known == name:
        seen.add_values(Local(name, "activation", one.shape, values), "step")
