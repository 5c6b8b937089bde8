"""Rows that stand under other names of their module: a fused tensor that was not cut apart as it was joined."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.moves import lines_of
from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import RowsUnderOtherNames
from shardviz.reference.windows import line_hashes
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair

    Outcomes = list[tuple[Outcome, Pair]]
    Sides = tuple[StoredTensor, StoredTensor]

MAX_ELEMENTS = 1 << 26
"""Of tensors that differ, as many elements as these are read once more; the rest is not looked at."""

MAX_SOURCES = 4
"""Names whose rows a tensor has that are listed."""


def with_rows_placed(outcomes: Outcomes) -> Outcomes:
    """Say which rows tensors have if those of one module have each other's rows, each row once."""
    groups: dict[tuple[str, str, int], list[str]] = {}
    sides = {outcome.name: pair for outcome, pair in _unexplained(outcomes)}
    for name, (first, _) in sides.items():
        groups.setdefault((name.rsplit(".", 2)[0], first.dtype, first.shape[-1]), []).append(name)
    words: dict[str, str] = {}
    budget = MAX_ELEMENTS
    for names in groups.values():
        budget -= sum(sides[name][0].size for name in names)
        if len(names) > 1 and budget > 0:
            words |= _exchanged([sides[name] for name in names])
    return [
        (outcome.became("moved", words[outcome.name], RowsUnderOtherNames()), pair)
        if outcome.name in words
        else (outcome, pair)
        for outcome, pair in outcomes
    ]


def _unexplained(outcomes: Outcomes) -> Iterator[tuple[Outcome, Sides]]:
    """Yield the tables that differ, for no known reason, with their two sides."""
    for outcome, pair in outcomes:
        first, second = pair.first, pair.second
        if outcome.verdict != "other" or outcome.explanation or not isinstance(first, StoredTensor):
            continue
        if isinstance(second, StoredTensor) and len(first.shape) > 1 and first.size and first.dtype == second.dtype:
            yield outcome, (first, second)


def _exchanged(sides: Sequence[Sides]) -> dict[str, str]:
    """Return in words which rows each tensor has, by name; empty unless the second has all rows of the first once."""
    try:
        tables = [tuple(line_hashes(lines_of(side)) for side in pair) for pair in sides]
    except DumpError:
        return {}
    names = np.concatenate([np.full(len(first), at) for at, (first, _) in enumerate(tables)])
    rows = np.concatenate([first for first, _ in tables])
    order = np.argsort(rows)
    distinct = len(np.unique(rows)) == len(rows)
    if not distinct or not np.array_equal(rows[order], np.sort(np.concatenate([second for _, second in tables]))):
        return {}
    words = {}
    for (first, _), (_, held) in zip(sides, tables, strict=True):
        counts = Counter(names[order[np.searchsorted(rows, held, sorter=order)]].tolist())
        if set(counts) != {next(at for at, side in enumerate(sides) if side[0] is first)}:
            parts = (f"{count:,} of {printable(sides[at][0].name)}" for at, count in sorted(counts.items()))
            words[first.name] = f"the second has here rows of the first's tensors: {listed(parts, MAX_SOURCES)}"
    return words
