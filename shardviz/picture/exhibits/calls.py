"""Results of a collective beside those that its definition gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.collectives import calls_of, values_of, wrong_after
from shardviz.picture.exhibits.exhibit import MOST_CELLS, MOST_ROWS, Cell, Exhibit, Row, exhibit, title_of
from shardviz.text import listed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.step.collectives import Wrong
    from shardviz.dump.dump import Dump
    from shardviz.explain.finding import Finding


def beside_definition(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return what the ranks of the first group that is off had before a call, got and should have got."""
    for call in calls_of(dump):
        if call.module == finding.tensor and set(call.ranks) & set(finding.ranks):
            wrong = wrong_after(dump, call)
            if wrong:
                order = sorted(call.ranks, key=lambda rank: rank not in wrong)
                rows = [_row(dump, call.module, rank, wrong.get(rank)) for rank in order[: MOST_ROWS * 2]]
                heads = ("", "had", "got", "expected")
                caption = f"{call.op} over {title_of(call.ranks)}"
                return exhibit(caption, heads, rows, len(order) - len(rows), noun="rank")
    return None


def _row(dump: Dump, name: str, rank: int, wrong: Wrong | None) -> Row:
    had, got = values_of(dump, f"{name}.before", rank), values_of(dump, name, rank)
    expected = Cell(_shown(wrong.wanted)) if wrong is not None else Cell("")
    return Row(title_of([rank]), (Cell(_shown(had)), Cell(_shown(got), wrong is not None), expected))


def _shown(values: NDArray[np.float64]) -> str:
    return f"[{listed((f'{value:.6g}' for value in values.ravel()[: MOST_CELLS + 1]), MOST_CELLS)}]"
