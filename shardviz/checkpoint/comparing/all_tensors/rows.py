"""Tensors whose rows are found elsewhere: fused weights, and rows under other names of their module."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import RowsUnderOtherNames
from shardviz.reference.lookup import line_hashes
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome, Outcomes

    Key = tuple[str, int, int]
    Sides = tuple[StoredTensor, StoredTensor]

MAX_PARTS = 4
"""Parts of a fused tensor that are named."""

MAX_CANDIDATES = 8
"""Parts with the same first line that are tried."""

MAX_ELEMENTS = 1 << 26
"""Of tensors that differ, as many elements as these are read once more; the rest is not looked at."""

MAX_SOURCES = 4
"""Names whose rows a tensor has that are listed."""


def with_fused(outcomes: Outcomes) -> Outcomes:
    """Match tensors that only one checkpoint has with one tensor that has the same lines."""
    lost = [pair.first for one, pair in outcomes if one.verdict == "missing" and isinstance(pair.first, StoredTensor)]
    new = [pair.second for one, pair in outcomes if one.verdict == "added" and isinstance(pair.second, StoredTensor)]
    fused, split = find_fused(lost, new), find_fused(new, lost)
    parts = {name for names in (*fused.values(), *split.values()) for name in names}
    remaining: Outcomes = []
    for outcome, pair in outcomes:
        if outcome.name in fused:
            words = f"one after the other, the first's {_parts(fused[outcome.name])}"
            remaining.append((outcome.became("moved", words, other=outcome.name), pair))
        elif outcome.name in split:
            words = f"the second has it in parts, one after the other: {_parts(split[outcome.name])}"
            remaining.append((outcome.became("moved", words), pair))
        elif outcome.name not in parts:
            remaining.append((outcome, pair))
    return remaining


def _parts(names: list[str]) -> str:
    return listed(map(printable, names), MAX_PARTS)


def find_fused(parts: Iterable[StoredTensor], wholes: Iterable[StoredTensor]) -> dict[str, list[str]]:
    """Return tensors that concatenate others along dim 0, with those tensors' names in order."""
    by_key: dict[Key, list[StoredTensor]] = {}
    for candidate in parts:
        if (key := next(_line_keys(candidate, 1), None)) is not None:
            by_key.setdefault(key, []).append(candidate)
    fused: dict[str, list[str]] = {}
    taken: set[str] = set()
    for whole in wholes if by_key else ():
        names = _tiling(whole, by_key, taken)
        if len(names) > 1:
            fused[whole.name] = names
            taken.update(names)
    return fused


def lines_of(tensor: StoredTensor) -> NDArray[Any]:
    """Return a tensor's bits as lines along its last dim; a vector's as single values."""
    return tensor.bits.reshape(-1, tensor.shape[-1] if len(tensor.shape) > 1 else 1)


def _line_keys(tensor: StoredTensor, most: int | None = None) -> Iterator[Key]:
    """Yield what stands for each of a tensor's lines; nothing if it cannot be read."""
    if not tensor.shape or not tensor.size:
        return
    try:
        lines = lines_of(tensor)[:most]
    except DumpError:
        return
    yield from ((tensor.dtype, lines.shape[1], hashed) for hashed in line_hashes(lines).tolist())


def _tiling(whole: StoredTensor, by_key: dict[Key, list[StoredTensor]], taken: set[str]) -> list[str]:
    """Return the parts that a tensor is made of, in order; none if any of its lines is of none."""
    keys = list(_line_keys(whole))
    names: list[str] = []
    at = 0
    while at < len(keys):
        candidates = [part for part in by_key.get(keys[at], ()) if part.name not in taken and part.name not in names]
        behind, few = lines_of(whole)[at:], candidates[:MAX_CANDIDATES]
        candidate = next((part for part in few if np.array_equal(behind[: len(lines_of(part))], lines_of(part))), None)
        if candidate is None:
            return []
        names.append(candidate.name)
        at += len(lines_of(candidate))
    return names


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
        if not outcome.is_open or not isinstance(first, StoredTensor):
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
