"""The raw values of a probe's step, sharded and unsharded, as the traces of two jobs.

What ranks judge while they run is in the dump; this is what they judged, for later code to judge again. The sharded
step is the dump's own trace, the unsharded one that of a job on one rank: `shardviz diff DUMP/unsharded DUMP`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from shardviz.dump.records.base import SCHEMA
from shardviz.dump.records.files import RunRecord
from shardviz.dump.write import TRACE_FOLDER, write_rank, write_run
from shardviz.live.capture.capture import Capture
from shardviz.live.run.tracing import groups_of
from shardviz.live.step.step import gradients
from shardviz.live.step.trace.points import add_points

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardviz.live.capture.locals import Local
    from shardviz.live.step.trace.recorded import Trace
    from shardviz.live.step.unsharded.step import UnshardedStep

UNSHARDED = "unsharded"


def write_sharded(folder: Path, of: Capture, before: Sequence[Local], after: Sequence[Local], trace: Trace) -> None:
    """Write what this rank had in the sharded step.

    Args:
        folder: The dump's.
        of: This rank's capture, for its place in the run.
        before: This rank's tensors before the step.
        after: The same after it, with their gradients.
        trace: What its modules were given and returned.
    """
    seen = Capture(of.rank, of.num_ranks, run_id=of.run_id)
    for name, ranks in groups_of(of.num_ranks):
        seen.add_group(name, ranks)
    _write(folder, seen, before, after, trace)


def write_unsharded(folder: Path, of: Capture, reference: UnshardedStep, after: Sequence[Local]) -> None:
    """Write what the unsharded model had in its step; one rank does.

    Args:
        folder: The dump's.
        of: This rank's capture.
        reference: The unsharded model's step.
        after: Its tensors after the step, with their gradients.
    """
    seen = Capture(0, 1, run_id=of.run_id)
    job = Capture(0, 1, run_id=of.run_id)
    _write(folder / UNSHARDED, seen, reference.before, after, reference.step.seen.trace)
    write_run(folder / UNSHARDED, _run(job))
    write_rank(folder / UNSHARDED, job.record(), job.dense)


def _write(folder: Path, seen: Capture, before: Sequence[Local], after: Sequence[Local], trace: Trace) -> None:
    for local in (*(replace(own, grad=None) for own in before if own.role == "param"), *gradients(after)):
        seen.add_values(local, "step")
    add_points(seen, trace)
    traced = folder / TRACE_FOLDER
    traced.mkdir(parents=True, exist_ok=True)
    if seen.rank == 0:
        write_run(traced, _run(seen))
    write_rank(traced, seen.record(), seen.dense)


def _run(seen: Capture) -> RunRecord:
    return RunRecord(SCHEMA, version("shardviz"), version("torch"), seen.num_ranks, run_id=seen.run_id)
