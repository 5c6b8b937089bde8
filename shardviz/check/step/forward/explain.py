"""The rules of this room, in the order in which they are tried: what numbers prove comes before what order suggests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.forward.labels import check_label_of_output
from shardviz.check.step.forward.order import check_repeated, check_started_again, check_ungathered
from shardviz.check.step.forward.parts import check_experts, check_fused, check_parts
from shardviz.check.step.forward.stages import check_stages
from shardviz.check.step.forward.sums import check_joined, check_sum_beside_a_vector

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
