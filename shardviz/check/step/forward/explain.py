"""The rules for outputs, in order: proofs by numbers before hints from order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.forward.order import check_repeated, check_started_again, check_ungathered
from shardviz.check.step.forward.parts import check_experts, check_fused, check_parts
from shardviz.check.step.forward.reason import Reason
from shardviz.check.step.forward.stages import check_stages
from shardviz.check.step.forward.sums import check_joined, check_sum_beside_a_vector
from shardviz.explain.step.forward import WrongOutputLabel
from shardviz.layout.candidates import shared_placements
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from shardviz.check.step.comparison import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.explain.finding import Finding
    from shardviz.layout.region import Region


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


def with_reason(evidence: Evidence, comparison: Compared, finding: Finding) -> Finding:
    """Add to an unexplained output's finding the first reason that the step supports."""
    is_output = comparison.role == "output"
    is_lone_loss = comparison is evidence.loss and not any(result.role == "output" for result in evidence.results)
    if not finding.generic or not (is_output or is_lone_loss):
        return finding
    rules = RULES if is_output else (check_stages,)
    reason = next((reason for rule in rules if (reason := rule(evidence, comparison)) is not None), None)
    return reason.of(finding if finding.pairs else finding.seen_in(comparison)) if reason is not None else finding


def with_parts_joined(evidence: Evidence, comparison: Compared, finding: Finding) -> Finding:
    """Return the finding of an output of another shape, with what its parts are or add up to."""
    reason = check_label_of_output(comparison) or check_joined(evidence, comparison)
    return replace(reason.of(finding), claimed=finding.claimed) if reason is not None else finding


def check_label_of_output(comparison: Compared) -> Reason | None:
    """Return the reason if the values that ranks hold are the unsharded model's under other placements."""
    layout = layout_of_values(comparison)
    if comparison.claimed is None or layout is None:
        return None
    labeled, right = (", ".join(map(str, one.placements() or ())) for one in (comparison.claimed, layout))
    sentence = f"what ranks hold is the unsharded model's output under ({right}): {write(layout)}"
    return Reason(WrongOutputLabel(labeled, right), sentence, held=write(layout))


def layout_of_values(comparison: Compared) -> Layout | None:
    """Return the layout that makes an output right on every rank; None without one."""
    if comparison.claimed is None or comparison.claimed.flat or comparison.role != "output":
        return None
    shapes = {rank: values.shape for rank, values in comparison.values.items()}

    def fits(rank: int, region: Region) -> bool:
        return comparison.near(comparison.values[rank], part_of(comparison.wanted, region))

    placements = shared_placements(comparison.wanted.shape, shapes, comparison.mesh, fits)
    return None if placements is None else Layout.from_placements(comparison.mesh, comparison.wanted.shape, placements)
