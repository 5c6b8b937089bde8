"""Results of a collective beside those that its definition gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.collectives import CallResults, values_of
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
    pair = next((pair for pair in finding.pairs if isinstance(pair, CallResults)), None)
    if pair is None:
        return None
    call = next(iter(pair.wrong.values())).call
    wrong = {rank: one for rank, one in pair.wrong.items() if one.call == call}
    order = sorted(call.ranks, key=lambda rank: rank not in wrong)
    rows = [_row(dump, call.module, rank, wrong.get(rank)) for rank in order[: MOST_ROWS * 2]]
    caption = f"{call.op} over {title_of(call.ranks)}"
    return exhibit(caption, ("", "had", "got", "expected"), rows, len(order) - len(rows), noun="rank")


def _row(dump: Dump, name: str, rank: int, wrong: Wrong | None) -> Row:
    had, got = values_of(dump, f"{name}.before", rank), values_of(dump, name, rank)
    expected = Cell(_shown(wrong.wanted)) if wrong is not None else Cell("")
    return Row(title_of([rank]), (Cell(_shown(had)), Cell(_shown(got), wrong is not None), expected))


def _shown(values: NDArray[np.float64]) -> str:
    return f"[{listed((f'{value:.6g}' for value in values.ravel()[: MOST_CELLS + 1]), MOST_CELLS)}]"
