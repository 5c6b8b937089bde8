"""Which finding hides which: the one that names a cause is reported, what merely follows from it is not.

`HIDES` is the whole table, and says why. A finding hides findings of its own tensor; in a step, whose results are
computed from each other, also those of other tensors. A check asks with `unhidden` what is left of its results beside
those of the checks before it. So a kind may hide itself: the later check only found it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar, cast

from shardviz.check.report import NotChecked
from shardviz.explain.finding import Finding, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Result = TypeVar("Result", bound=Finding | NotChecked)

Row = Kind | Literal["generic foreign", "generic wrong-value", "not checked: order", "not checked: values"]
"""A kind of finding, a mismatch of that kind without a cause (`Finding.generic`), or a check that could not run."""

Rows = frozenset[Row]

ORDER: Rows = frozenset({"misordered", "misordered-within-shard", "wrong-placement", "wrong-shape"})
"""Every element is there, but not where the label says."""

CONTENT: Rows = frozenset({"missing", "duplicated", "foreign", "generic foreign", "name-collision"})
"""Elements are lost, repeated, or not the tensor's own."""

PLACES = ORDER | CONTENT
"""The shards do not hold the elements they claim."""

VALUES: Rows = frozenset({"unreplicated", "identical-shards", "not checked: values"})
"""What the model's own numbers show, or cannot show."""

GATHERED: Rows = frozenset({"collective-mismatch"})
"""What torch gathers is not in order."""

UNEXPLAINED: Rows = frozenset({"generic wrong-value"})
"""A result of a step is wrong, and no rule knows why."""

OF_SHARDS = VALUES | GATHERED
"""Wrong shards are gathered wrongly, which is added to their own finding; and ranks that hold different elements have
no copies to compare."""

HIDES: Mapping[Row, Rows] = {
    "missing": OF_SHARDS,
    "duplicated": OF_SHARDS,
    "foreign": OF_SHARDS,
    "generic foreign": OF_SHARDS,
    "name-collision": OF_SHARDS,
    "misordered-within-shard": OF_SHARDS,
    # Also a result of a step: the right slices in another order explain the numbers computed from them.
    "misordered": OF_SHARDS | UNEXPLAINED,
    # A label that cannot be right is why the order does not match it. Lost elements are reported beside it.
    "wrong-placement": OF_SHARDS | ORDER,
    "wrong-shape": OF_SHARDS | ORDER,
    # Copies are compared by the claimed layout, which is not the intended one, or which torch itself gets wrong.
    "wrong-segment": VALUES,
    "collective-mismatch": VALUES,
    # Context parallel reorders the tensors of a sequence on purpose: only a difference between them is wrong.
    "sequence-order": PLACES | VALUES | {"wrong-segment", "not checked: order"},
    # Values that were written after stamping replace the ids: how they differ between ranks says what wrote them.
    "unreplicated": frozenset({"generic foreign"}),
    "identical-shards": frozenset({"generic foreign"}),
    # Of a step's wrong results, those that a rule explains, and the loss before its gradients, explain the rest.
    "wrong-scale": UNEXPLAINED,
    "wrong-value": UNEXPLAINED,
    "generic wrong-value": UNEXPLAINED,
    "unreduced-output": UNEXPLAINED,
    "unreduced-scalar": UNEXPLAINED,
}
"""For each row, the rows that it hides."""


def unhidden(
    results: Iterable[Result], causes: Iterable[Finding | NotChecked], *, anywhere: bool = False
) -> list[Result]:
    """Return the results that none of the causes hides.

    Args:
        results: What a check found.
        causes: What may explain it; checks that could not run explain nothing.
        anywhere: Whether causes hide results of other tensors too.
    """
    hidden: dict[str, set[Row]] = {}
    for cause in causes:
        if isinstance(cause, Finding):
            hidden.setdefault("" if anywhere else cause.tensor, set()).update(HIDES.get(_row(cause), ()))
    return [one for one in results if _row(one) not in hidden.get("" if anywhere else one.tensor, ())]


def is_of_places(finding: Finding) -> bool:
    """Whether a finding says that shards do not hold the elements they claim."""
    return _row(finding) in PLACES


def _row(result: Finding | NotChecked) -> Row:
    """Return the row of a result; those that the table does not have hide nothing and are never hidden."""
    if isinstance(result, NotChecked):
        return cast("Row", f"not checked: {result.about}")
    return cast("Row", f"generic {result.kind}") if result.generic else result.kind
