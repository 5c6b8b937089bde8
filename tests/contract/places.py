"""Every place that a recorded case's files have ends as exactly one of held, finding, cannot tell and not checked.

What is called held is laid beside its reference here once more, by other code than the judge's: a mark of "in order" on
something that nobody compared is an error of the first rank.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from shardviz.check.order.rules.intent import intended_text
from shardviz.check.run import report_on
from shardviz.check.step.comparison import compared
from shardviz.check.verdicts import State, recorded, state_of, verdict_on
from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.errors import DumpError, ShardvizError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.check.report import Report
    from shardviz.dump.dump import Dump, Tensor
    from tests.contract.store import Room

PARTS = 20
"""`compare` looks at the first of so many parts of the cases, the nightly lane at the others."""
MAX_IDS = 1 << 17
"""Of larger parts a dump lays no ids out."""
NOISE = 1e-15
"""Values as small as this are what rounding leaves of a sum that is zero."""


def cases_of(room: Room, part: int) -> list[str]:
    """Return the names of a part of a room's cases that may be dumps."""
    return [case.name for case in room.cases.values() if case.command[0] == "check"][part::PARTS]


def mistakes_in(folder: Path) -> list[str]:
    """Return what the report on a case's dump calls held and is not; nothing if there is no dump, or it is refused."""
    try:
        dump = dump_of(read_files(folder, strict=False))
    except ShardvizError:
        return []
    found = []
    with suppress(DumpError):  # its files lack what the step is compared with: it is refused
        found += mistakes(dump)
    return found


def mistakes(dump: Dump) -> Iterator[str]:
    """Yield what the report on a dump calls held and is not, and places that do not add up."""
    report = report_on(dump)
    places = list(recorded(dump))
    states = Counter(state_of(dump, tensor, name, report) for tensor, name in places)
    if sum(states[state] for state in get_args(State)) != len(places):
        yield f"{len(places)} places, and {dict(states)}"
    for tensor, name in places:
        if state_of(dump, tensor, name, report) == "held":
            yield from (f"{tensor.moment} {tensor.role} {name}: {text}" for text in not_held(dump, tensor, name))
        elif verdict_on(dump, tensor, [name], report) == "good":
            yield f"{tensor.moment} {tensor.role} {name} has a mark and is {state_of(dump, tensor, name, report)}"
    yield from unmarked(dump, report)
    yield from marked_and_off(dump, report)


def marked_and_off(dump: Dump, report: Report) -> Iterator[str]:
    """Yield weights with a mark whose gradient is off, if no note says what of the step was not judged."""
    if not report.findings or any(note.about == "step" and not note.tensor for note in report.not_checked):
        return
    off = {result.name for result in compared(dump, ("grad",)) if not result.incomparable and result.wrong}
    for tensor in dump.at("stamped"):
        for name in off.intersection(tensor.names):
            if verdict_on(dump, tensor, [name], report) == "good":
                yield f"{name} has a mark, and its gradient is off"


def unmarked(dump: Dump, report: Report) -> Iterator[str]:
    """Yield what was compared and is no place of the files: then the sum would not be of what was recorded."""
    known = {(tensor.moment, tensor.role, name) for tensor, name in recorded(dump)}
    yield from (f"{place} was compared and is not recorded" for place in report.compared if place not in known)


def not_held(dump: Dump, tensor: Tensor, name: str) -> Iterator[str]:
    """Yield what a tensor that is called held is not; nothing where another order or layout is meant."""
    if any(" order " in text for text in dump.files.run.intended.values()):
        return
    if tensor.moment == "stamped":
        is_meant = bool(intended_text(dump.files.run.intended, name))
        yield from () if is_meant else misplaced(dump, tensor, name)
    elif tensor.moment == "step":
        moment = "updated" if tensor.role in ("param", "buffer", "optim") else "reference"
        reference = dump.find(moment, tensor.role, name)
        if reference is None:
            yield "nothing was there to compare it with"
        elif not reference.dtype.startswith("complex"):
            yield from far_off(dump, tensor, name, np.asarray(dump.values(reference.first, name), np.float64))
    elif tensor.moment != "initial":
        yield f"nothing is compared of the moment {tensor.moment}"


def misplaced(dump: Dump, tensor: Tensor, name: str) -> Iterator[str]:
    """Yield the ranks whose ids are not those of the region that they claim."""
    for rank, shard in tensor.shards.items():
        layout = shard.layout
        too_large = math.prod(shard.body.local_shape) > MAX_IDS
        if layout is None or layout.partial or layout.flat or rank not in layout.mesh or too_large:
            continue
        own, region = dump.local_ids(shard, name), layout.region_of_rank(rank)
        due = region.flat_ids(layout.shape)
        # An average of weights is a copy of them: it holds the same part of a weight of its own shape.
        others = [due + stamp.first for stamp in dump.stamps.values() if stamp.shape == layout.shape]
        stamp = dump.stamps.get(name)
        padded = part_of(with_padding(stamp.shape, layout.shape), region.dims) if stamp is not None else due + 1
        is_due = any(np.array_equal(own, ids) for ids in (due + 1, padded, *(-1 - other for other in others)))
        if not (is_due or own.size == due.size == 0):
            yield f"rank {rank} does not hold the region that it claims"


def with_padding(shape: tuple[int, ...], larger: tuple[int, ...]) -> NDArray[Any]:
    """Return the ids of a tensor with zeros behind them along its dims, as much as a larger shape has."""
    ids = np.arange(1, math.prod(shape) + 1).reshape(shape)
    if len(shape) != len(larger) or any(size > own for size, own in zip(shape, larger, strict=True)):
        return np.zeros(larger, np.int64)
    return np.pad(ids, [(0, own - size) for size, own in zip(shape, larger, strict=True)]) if shape else ids


def far_off(dump: Dump, tensor: Tensor, name: str, wanted: NDArray[np.float64]) -> Iterator[str]:
    """Yield the ranks with an element that is farther from all of the reference's than these are large."""
    claimed = tensor.claimed
    if claimed is not None and claimed.partial:
        return
    size = float(np.max(np.abs(wanted), initial=0.0))
    for rank, shard in tensor.shards.items():
        values = np.asarray(dump.values(shard, name), np.float64)
        due = wanted
        # Ranks may have rows of the batch in another order than one process: then an output's place is not known.
        if claimed is not None and not claimed.flat and rank in claimed.mesh and tensor.role != "output":
            whole = laid_out(wanted, claimed.shape)
            due = wanted if whole is None else part_of(whole, claimed.region_of_rank(rank).dims)
        if due.shape == values.shape and tensor.role != "output":
            apart = float(np.max(np.abs(values - due)[~np.isnan(due)], initial=0.0))
        else:
            apart = max((float(np.min(np.abs(wanted - value))) for value in values.ravel()), default=0.0)
        if not (apart < max(size, NOISE) or apart == 0.0):
            yield f"rank {rank} is off by {apart:.3g}, and the reference has at most {size:.3g}"


def laid_out(wanted: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64] | None:
    """Return values in a claimed shape: NaN where it has padding, which nothing is compared with; None if none fits."""
    if wanted.size == math.prod(shape):
        return wanted.reshape(shape)
    if wanted.ndim != len(shape) or any(size > own for size, own in zip(wanted.shape, shape, strict=True)):
        return None  # an output that is laid out by its values, not as a part of the batch's rows
    more = [(0, own - size) for size, own in zip(wanted.shape, shape, strict=True)]
    return np.pad(wanted, more, constant_values=np.nan)


def part_of(whole: NDArray[np.float64], dims: tuple[tuple[tuple[int, int], ...], ...]) -> NDArray[np.float64]:
    """Return the product of some ranges of each dim."""
    for dim, ranges in enumerate(dims):
        at = [number for first, last in ranges for number in range(first, last)]
        whole = np.take(whole, at, axis=dim)
    return whole
