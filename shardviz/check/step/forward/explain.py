"""The rules of this room, in the order in which they are tried: what numbers prove comes before what order suggests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.forward.order import check_repeated, check_started_again, check_ungathered
from shardviz.check.step.forward.parts import check_experts, check_fused, check_parts
from shardviz.check.step.forward.reason import Reason
from shardviz.check.step.forward.stages import check_stages
from shardviz.check.step.forward.sums import check_joined, check_sum_beside_a_vector
from shardviz.explain.forward import WrongOutputLabel
from shardviz.layout.candidates import placements_of
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding


RULES = (
    check_sum_beside_a_vector,
    check_repeated,
    check_stages,
    check_started_again,
    check_experts,
    check_parts,
    check_fused,
    check_ungathered,
)


def with_reason(evidence: Evidence, one: Compared, found: Finding) -> Finding:
    """Return the finding of an output that no other rule explains, with the first reason that its step bears out."""
    if one.role != "output" or not found.generic:
        return found
    reason = next((reason for rule in RULES if (reason := rule(evidence, one)) is not None), None)
    return reason.of(found) if reason is not None else found


def with_parts_joined(evidence: Evidence, one: Compared, found: Finding) -> Finding:
    """Return the finding of an output of another shape, with what its parts are or add up to."""
    reason = check_label_of_output(one) or check_joined(evidence, one)
    return replace(reason.of(found), claimed=found.claimed) if reason is not None else found


def check_label_of_output(one: Compared) -> Reason | None:
    """Return the reason if the values that ranks hold are the unsharded model's under other placements."""
    layout = layout_of_values(one)
    return _of_label(one.claimed, layout) if one.claimed is not None and layout is not None else None


def layout_of_values(one: Compared) -> Layout | None:
    """Return the layout under which an output's values are the unsharded model's on every rank; None if none is."""
    if one.claimed is None or one.claimed.flat or one.role != "output":
        return None
    first = next(iter(one.values))
    for placements, _ in placements_of(one.wanted.shape, one.values[first].shape, one.mesh, first):
        layout = Layout.from_placements(one.mesh, one.wanted.shape, placements)
        if all(_fits(one, layout, rank) for rank in one.values):
            return layout
    return None


def _fits(one: Compared, layout: Layout, rank: int) -> bool:
    region = layout.region(one.mesh.coord_of(rank))
    if region.shape != one.values[rank].shape:
        return False
    return one.near(one.values[rank], part_of(one.wanted, region))


def _of_label(claimed: Layout, layout: Layout) -> Reason:
    labeled, due = (", ".join(map(str, one.placements() or ())) for one in (claimed, layout))
    return Reason(
        WrongOutputLabel(labeled, due),
        f"what ranks hold is the unsharded model's output under ({due}): {write(layout)}",
        held=write(layout),
    )
