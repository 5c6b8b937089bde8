"""Master copies of weights in an optimizer's flat buffers: elements held and claimed.

The ids of a master copy are the places of its values in the weight that the job holds: every disagreement is one
between the two. Where the weight itself is wrong, that is the finding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from shardviz.explain.checkpoints.states import MisplacedMaster, RankDependentOffsets, StaleMaster
from shardviz.explain.finding import Finding
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case
    from shardviz.check.report import NotChecked
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Coord

MAX_LISTED = 4
MASTER = ".fp32"
"""How the names of master copies end."""


def is_master(dump: Dump, name: str) -> bool:
    """Whether a tensor with ids is a master copy: neither a weight nor a moment."""
    stamp = dump.stamps.get(name)
    return stamp is not None and stamp.role == "optim" and name.endswith(MASTER)


def check_master(case: Case) -> Iterator[Finding]:
    """Yield findings if a master copy has elements of a different place, or a different weight."""
    wrong = {coord: ids for coord in case.shards if (ids := _wrong_ids(case, coord)) is not None}
    if not wrong:
        return
    texts = {case.rank(coord): _held_text(case, coord, ids) for coord, ids in wrong.items()}
    elsewhere = {rank: text for rank, text in texts.items() if text}
    ranks = tuple(texts)
    of = f"{len(ranks):,} of {len(case.shards):,} ranks"
    if elsewhere:
        sentence = "; ".join(f"rank {rank} has {text}" for rank, text in sorted(elsewhere.items())[:MAX_LISTED])
        text = f"{of} do not have the elements in the master copy that they claim: {sentence}"
        yield case.finding(MisplacedMaster(), ranks, text)
        return
    lost = sum(int(np.count_nonzero(ids != _expected_ids(case, coord))) for coord, ids in wrong.items())
    text = f"cast to its dtype, {lost:,} of {counted(case.numel, 'element')} differ from it"
    yield case.finding(StaleMaster(), ranks, f"the master copy on {of} is not the weight's: {text}")


def _wrong_ids(case: Case, coord: Coord) -> NDArray[np.int64] | None:
    """Return a coordinate's ids; None if they are those that it claims."""
    ids = case.local_ids(coord).ravel()
    return None if np.array_equal(ids, _expected_ids(case, coord)) else ids


def _expected_ids(case: Case, coord: Coord) -> NDArray[np.int64]:
    """Return the ids that a coordinate claims, as many as it has; without a claim those from 1."""
    size = case.local_ids(coord).size
    return np.resize(case.claimed_ids(coord) if case.claimed is not None else np.arange(1, size + 1), size)


def _held_text(case: Case, coord: Coord, ids: NDArray[np.int64]) -> str:
    """Say which elements a shard mostly has instead, of the weight or a different one."""
    expected = _expected_ids(case, coord)
    moved, is_foreign = (ids != expected) & (ids > 0), ids < -1
    half = np.count_nonzero(ids != expected) / 2
    if moved.sum() >= half and moved.any():
        at = int(np.argmax(moved))
        return f"element {ids[at] - 1} of it but says that it has element {expected[at] - 1}"
    if is_foreign.sum() >= half and is_foreign.any():
        at = int(np.argmax(is_foreign))
        name, element = case.owner(-1 - int(ids[at]))
        return f"element {element} of {name} but says that it has element {expected[at] - 1} of this one"
    return ""


def of_masters(dump: Dump, results: list[Finding | NotChecked]) -> list[Finding | NotChecked]:
    """Return what was found, without master copies whose weights are wrong themselves.

    On ranks that have some elsewhere, those that are not found are taken to be elsewhere too: they are in the
    same buffers, and cut where the buffers end.
    """
    findings = [finding for finding in results if isinstance(finding, Finding)]
    wrong = {finding.tensor for finding in findings}
    moved = {rank for finding in findings if isinstance(finding.explanation, MisplacedMaster) for rank in finding.ranks}
    return [
        outcome.because(MisplacedMaster()) if _is_stale(outcome) and moved & set(outcome.ranks) else outcome
        for outcome in results
        if not (is_master(dump, outcome.tensor) and outcome.tensor.rpartition(".")[0] in wrong)
    ]


def _is_stale(result: Finding | NotChecked) -> TypeGuard[Finding]:
    return isinstance(result, Finding) and isinstance(result.explanation, StaleMaster)


def check_fragments(dump: Dump) -> Iterator[Finding]:
    """Yield tensors that ranks do not divide among themselves, by what each says that it has."""
    spans_of: dict[str, dict[int, tuple[int, int]]] = {}
    for rank, record in dump.files.ranks.items():
        for fragment in record.fragments:
            spans_of.setdefault(fragment.name, {})[rank] = fragment.start, fragment.size
    for name, spans in spans_of.items():
        if name in dump.stamps:
            numel = dump.stamps[name].last - dump.stamps[name].first + 1
            parts = [f"{_span(start, size)} on rank {rank}" for rank, (start, size) in sorted(spans.items()) if size]
            wrong = _gaps_text(spans, numel)
            yield RankDependentOffsets().finding(
                name,
                tuple(sorted(spans)),
                f"ranks say that they have {listed(parts, MAX_LISTED)} of its {counted(numel, 'element')}: {wrong}",
            )


def _span(start: int, size: int) -> str:
    return f"element {start}" if size == 1 else f"elements {start} to {start + size - 1}"


def _gaps_text(spans: dict[int, tuple[int, int]], numel: int) -> str:
    """Say what of a tensor no rank has, or several have, or is not in it."""
    end, faults = 0, []
    for start, size in sorted(span for span in spans.values() if span[1]):
        if start > end:
            faults.append(f"{_span(end, start - end)} on none")
        elif start < end:
            faults.append(f"{_span(start, end - start)} on several")
        end = max(end, start + size)
    if end > numel:
        faults.append(f"{_span(numel, end - numel)} not in it")
    elif end < numel:
        faults.append(f"{_span(end, numel - end)} on none")
    return listed(faults, MAX_LISTED) or "their buffers have room for other parts of it"
