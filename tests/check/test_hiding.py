"""Which finding hides which: the table names what exists, and a cause hides what follows from it only."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from shardviz.check.hiding import HIDES, unhidden
from shardviz.check.report import About, NotChecked
from shardviz.explain.finding import Kind
from tests.findings import make_finding

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding
    from shardviz.explain.finding import Kind as OfFinding

KINDS = set(get_args(Kind))
ROWS = KINDS | {f"generic {kind}" for kind in KINDS} | {f"not checked: {about}" for about in get_args(About)}


def found(kind: OfFinding, tensor: str = "w", *, generic: bool = False) -> Finding:
    return make_finding(kind, "error", tensor, (0,), "wrong", generic=generic)


def test_every_row_of_the_table_is_a_kind_that_exists() -> None:
    named = set(HIDES).union(*HIDES.values())
    assert named - ROWS == set()
    assert not any(row.startswith("not checked") for row in HIDES)


def test_every_row_that_the_table_hides_is_hidden() -> None:
    for kind, rows in HIDES.items():
        cause = found(kind.removeprefix("generic "), generic=kind.startswith("generic"))  # type: ignore[arg-type]
        for row in rows:
            if row.startswith("not checked: "):
                result: Finding | NotChecked = NotChecked("w", "why", row.removeprefix("not checked: "))  # type: ignore[arg-type]
            else:
                result = found(row.removeprefix("generic "), generic=row.startswith("generic"))  # type: ignore[arg-type]
            assert unhidden([result], [cause]) == []
            assert unhidden([result], [found(cause.kind, "other", generic=cause.generic)]) == [result]


def test_what_has_a_cause_of_its_own_stays_beside_another_cause() -> None:
    explained = found("wrong-value")
    assert unhidden([explained], [found("wrong-scale")], anywhere=True) == [explained]
    assert unhidden([found("wrong-value", generic=True)], [found("wrong-scale", "v")], anywhere=True) == []
