"""Which exhibit a finding has, by its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.order.case import LaidOut
from shardviz.errors import ShardvizError
from shardviz.picture.exhibits import copies, orders, steps

if TYPE_CHECKING:
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding
    from shardviz.picture.exhibits.exhibit import Exhibit


def exhibit_of(dump: Dump, finding: Finding, laid_out: LaidOut | None = None) -> Exhibit | None:
    """Return the table that shows a finding; None if its map or its words already do.

    Args:
        finding: The finding of one tensor; of several, whose first is shown; or of the whole run.
        laid_out: The dump's tensors, as a check laid them out; laid out here if there was none.
    """
    cases = laid_out or LaidOut(dump)
    try:
        return _of_kind(dump, finding.each[0] if finding.tensor else finding, cases)
    except ShardvizError:
        return None  # a damaged part of the dump: the check says so


def _of_kind(dump: Dump, finding: Finding, cases: LaidOut) -> Exhibit | None:
    match finding.kind:
        case "unreplicated":
            return copies.differing_copies(dump, finding) or steps.beside_reference(finding)
        case "identical-shards":
            return copies.repeated_shards(dump, finding)
        case "untied":
            return copies.broken_tie(dump, finding)
        case "wrong-scale":
            return steps.added_too_often(dump, finding) or steps.beside_reference(finding)
        case "unreduced-gradient" | "unreduced-scalar" | "unreduced-output":
            return (
                steps.lacking_reduction(finding)
                or steps.beside_reference(finding)
                or copies.differing_copies(dump, finding)
            )
        case "wrong-value":
            return steps.beside_reference(finding)
        case "misordered" | "misordered-within-shard":
            return (
                orders.along_shards(dump, finding, cases)
                or orders.of_each_segment(dump, finding, cases)
                or steps.beside_reference(finding)
            )
        case "wrong-segment":
            return orders.of_each_segment(dump, finding, cases)
        case "sequence-order":
            return orders.along_sequence(finding, dump.files.mesh)
        case "name-collision" | "foreign":
            return copies.name_owners(dump, finding, cases)
        case "rank-order":
            return copies.numbers_in_groups(dump, finding)
        case "incomplete":
            return copies.absent_ranks(dump, finding)
        case "collective-mismatch":
            return orders.out_of_place(finding) or orders.beside_definition(dump, finding)
        case "wrong-shape":
            return copies.local_shapes(dump, finding)
        case "wrong-placement":
            return copies.claimed_layouts(dump, finding) or copies.local_shapes(dump, finding)
        case _:
            return None
