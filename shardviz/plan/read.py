"""Read and write a plan's file. What a stranger wrote is checked before anything is made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.validate import check_rank, mesh_of
from shardviz.errors import DumpError
from shardviz.plan.ranks import PlannedRanks
from shardviz.text import counted

if TYPE_CHECKING:
    from shardviz.dump.records.files import RunRecord
    from shardviz.dump.validate import StampedShapes
    from shardviz.plan.records import PlanPart, PlanRecord


def check_plan(plan: PlanRecord, run: RunRecord, stamped: StampedShapes) -> PlannedRanks:
    """Make sure that the parts of a plan fit each other and its run, and return its ranks.

    Raises:
        DumpError: They do not.
    """
    if run.mesh is None:
        raise DumpError("run.json has no mesh, and a plan needs one")
    mesh = mesh_of(run.mesh)
    if mesh.size != run.num_ranks:
        raise DumpError(f"the mesh has {counted(mesh.size, 'rank')}, expected {run.num_ranks:,}")
    for index, part in enumerate(plan.parts):
        try:
            _check_part(part, run, stamped)
        except DumpError as error:
            raise DumpError(f"parts[{index}]: {error.message}") from error
    ranks = PlannedRanks(plan, mesh)
    counts = sum(len(part.ranks) for part in ranks.parts)
    if counts != mesh.size or len(ranks) != mesh.size:
        raise DumpError(f"its parts stand for {counts:,} ranks, {len(ranks):,} of them different, of {mesh.size:,}")
    return ranks


def _check_part(part: PlanPart, run: RunRecord, stamped: StampedShapes) -> None:
    check_rank(part.record, run, stamped)
    if any(body.held or body.runs or body.dense or body.values is not None for body in part.record.bodies):
        raise DumpError("a plan has no values and no ids, and a body of this part has some")
