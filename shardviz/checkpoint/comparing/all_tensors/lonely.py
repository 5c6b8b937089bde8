"""Tensors that one checkpoint lacks: absent in their file, masters, lost states, or rows of another weight."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.equality import is_same
from shardviz.checkpoint.comparing.outcome import KEPT, SIDES, Outcome, with_replaced
from shardviz.checkpoint.findings import copied_files
from shardviz.checkpoint.optimizer import state_of
from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import RowsUnderOtherNames
from shardviz.explain.checkpoints.files import FileCopiedOver, StaleFileIndex, UnreadableFile
from shardviz.explain.checkpoints.states import StatelessParameters
from shardviz.groups import the_only
from shardviz.reference.lookup import line_hashes
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcomes, Verdict
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint

    Key = tuple[str, int, int]
    Sides = tuple[StoredTensor, StoredTensor]

MASTERS = ("fp32", "fp32_param", "master_param", "param")


def lonely_outcomes(pairs: Sequence[Pair], checkpoints: tuple[Checkpoint, Checkpoint]) -> Outcomes:
    """Return the outcomes of tensors that one checkpoint lacks, or that are in a missing file of it."""
    copies = [copied_files(checkpoint) for checkpoint in checkpoints] if pairs else []
    outcomes = []
    for pair in pairs:
        at = pair.second is None
        file = checkpoints[at].indexed.get(pair.name, "")
        outcome = _of_file(pair, checkpoints[at], file, copies[at]) if file else lonely_outcome(pair, SIDES[not at])
        outcomes.append((outcome, pair))
    return outcomes


def _of_file(pair: Pair, checkpoint: Checkpoint, file: str, copies: Mapping[str, str]) -> Outcome:
    """Return the outcome of a tensor that is not in the file in which a checkpoint's index says that it is."""
    is_gone = checkpoint.file_sizes[file] is None
    twin = "" if is_gone else copies.get(file, "")
    has = "does not exist" if is_gone else f"has the tensors of {twin} instead" if twin else "does not have it"
    cause = FileCopiedOver(printable(file), printable(twin)) if twin else StaleFileIndex()
    why = f"{checkpoint.folder / file} {has}, and the index says that it is there"
    return Outcome(pair.name, "", "unreadable").became("unreadable", why, UnreadableFile() if is_gone else cause)


def lonely_outcome(pair: Pair, which: str) -> Outcome:
    """Return the outcome of a tensor that only one side has: `which` says which one."""
    verdict: Verdict = "missing" if pair.second is None else "added"
    more = f"; as the map says, {pair.lacking}" if pair.lacking else ""
    return Outcome(pair.name, "", verdict, f"only the {which} has it{more}")


def with_masters(outcomes: Outcomes) -> Outcomes:
    """Find masters that one side lacks and has as weights."""
    weights = {pair.name: pair for _, pair in outcomes if state_of(pair.name) is None}
    return [(_as_master(outcome, pair, weights), pair) for outcome, pair in outcomes]


def _as_master(outcome: Outcome, pair: Pair, weights: Mapping[str, Pair]) -> Outcome:
    """Say of a master that one side has whether the other has its values as the weight."""
    state, master = state_of(pair.name), pair.first or pair.second
    if master is None or state is None or state[1] not in MASTERS or outcome.verdict not in ("missing", "added"):
        return outcome
    at = int(pair.first is not None)
    of_owner = _weight_of(state[0], weights)
    weight = None if of_owner is None else of_owner.sides[at]
    if weight is None or weight.dtype != master.dtype or weight.shape != master.shape:
        return outcome
    side, name = SIDES[at], printable(weight.name)
    if is_same(master, weight):
        return outcome.became("tied", f"{outcome.why}: the {side} has it as its weight {name}", other=weight.name)
    return outcome.became(outcome.verdict, f"{outcome.why}; the {side}'s weight {name} has different values")


def _weight_of(parameter: str, weights: Mapping[str, Pair]) -> Pair | None:
    """Return the only weight that matches an optimizer's parameter name, or None."""
    return the_only([pair for name, pair in weights.items() if name == parameter or name.endswith(f".{parameter}")])


def with_lost_states(outcomes: Outcomes) -> Outcomes:
    """Explain that the second checkpoint lacks the state of some parameters but has others'."""
    states = [(outcome, pair, *state) for outcome, pair in outcomes if (state := state_of(pair.name)) is not None]
    lost = {parameter for outcome, _, parameter, _ in states if outcome.verdict == "missing"}
    kept = {
        parameter
        for outcome, pair, parameter, key in states
        if pair.second is not None or (outcome.verdict != "missing" and key not in MASTERS)
    }
    lost -= kept
    if not lost or not kept:
        return outcomes
    weights = {pair.name: pair for _, pair in outcomes if state_of(pair.name) is None}
    moved = {id(pair) for outcome, pair in outcomes if outcome.verdict not in KEPT}
    of_lost = {parameter: _weight_of(parameter, weights) for parameter in lost}
    lost = {name for name, weight in of_lost.items() if weight is None or weight.second is not None}
    cause = StatelessParameters(any(id(of_lost[name]) in moved for name in lost))
    words = f"the second has no state of {len(lost):,} of {len(lost | kept):,} parameters"
    without = [(one, pair) for one, pair, parameter, _ in states if one.verdict == "missing" and parameter in lost]
    explained = {id(pair): one.became("missing", f"{one.why}; {words}", cause) for one, pair in without}
    return with_replaced(outcomes, explained)


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
