"""Which finding follows from which: a consequence is left out, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked, unhidden
from shardviz.explain.kinds import KINDS
from tests.findings import finding_of

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding, Kind


def found(kind: Kind, tensor: str = "w", *, generic: bool = False) -> Finding:
    return finding_of(kind, "error", tensor, (0,), "wrong", generic=generic)


def test_a_finding_follows_from_others_of_its_tensor_only() -> None:
    for kind, page in KINDS.items():
        for origin in page.follows_from:
            for cause in (found(origin), found(origin, generic=True)):
                assert unhidden([found(kind)], [cause]) == []
                assert unhidden([found(kind)], [replace(cause, tensor="other")]) == [found(kind)]
        for origin in set(KINDS) - page.follows_from:
            assert unhidden([found(kind)], [found(origin)]) == [found(kind)]


def test_only_a_finding_without_a_cause_follows_from_what_replaced_the_ids_or_from_other_results() -> None:
    for kind, page in KINDS.items():
        for origin in page.unexplained_from - page.follows_from:
            assert unhidden([found(kind, generic=True)], [found(origin)]) == []
            assert unhidden([found(kind)], [found(origin)]) == [found(kind)]


def test_a_check_that_could_not_run_is_not_missed_if_the_order_is_known_to_be_wrong() -> None:
    copies, order, ties = (NotChecked("w", "why", about) for about in ("values", "order", "ties"))
    assert unhidden([copies, order, ties], [found("misordered")]) == [order, ties]
    assert unhidden([copies, order, ties], [found("sequence-order")]) == [ties]
    assert unhidden([copies, order, ties], [copies]) == [copies, order, ties]


def test_what_has_a_cause_of_its_own_stays_beside_another_cause() -> None:
    explained = found("wrong-value")
    assert unhidden([explained], [found("wrong-scale")], anywhere=True) == [explained]
    assert unhidden([found("wrong-value", generic=True)], [found("wrong-scale", "v")], anywhere=True) == []
