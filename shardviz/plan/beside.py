"""Two plans side by side: what the fullest rank holds, and what a rank receives in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.text.tables.table import table
from shardviz.plan.counting.amounts import ROLES, Amounts
from shardviz.plan.counting.traffic import crossing, received_along
from shardviz.text import bytes_text

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.plan.ranks import PlannedRanks


SUMS = ("together", "crossing")
"""How the names of rows begin that come last: they are about the rows above them."""


def beside_lines(before: PlannedRanks, after: PlannedRanks) -> list[Text]:
    """Return a table of the bytes of both, with what has changed.

    Args:
        before: The plan to compare with.
        after: The plan that may have changed.
    """
    rows = [["bytes of the fullest rank", "before", "after", "change"], *_rows(_held(before), _held(after))]
    if received := _rows(_received(before), _received(after)):
        rows += [["received in a step, at most", "", "", ""], *received]
    return table(rows)


def _held(ranks: PlannedRanks) -> dict[str, int]:
    amounts = Amounts(ranks)
    roles = {role: int(amounts.by_role[role][amounts.fullest]) for role in ROLES}
    return {role: size for role, size in roles.items() if size} | {"together": int(amounts.together[amounts.fullest])}


def _received(ranks: PlannedRanks) -> dict[str, int]:
    found = received_along(ranks.plan, ranks.mesh)
    node = ranks.plan.node
    return found | ({f"crossing nodes of {node}": crossing(ranks.plan, ranks.mesh)} if node and found else {})


def _rows(before: dict[str, int], after: dict[str, int]) -> list[list[str]]:
    names = sorted({**before, **after}, key=lambda name: name.startswith(SUMS))
    return [[f"  {name}", *_cells(before.get(name), after.get(name))] for name in names]


def _cells(before: int | None, after: int | None) -> list[str]:
    texts = ["-" if size is None else bytes_text(size) for size in (before, after)]
    more = (after or 0) - (before or 0)
    return [*texts, f"{'+' if more > 0 else '-'}{bytes_text(abs(more))}" if more else "="]
