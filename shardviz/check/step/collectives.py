"""`collective-mismatch`: a collective gave other numbers than its definition does.

Ranks are counted within the group, `size` of them; parts are equal and in the group's order. The result of a `reduce`
or `gather` is defined on its root only, and not looked at elsewhere.

torch's own reassembly has bugs: in 2.13 some uneven nested shards come back wrong. If the shards themselves are not as
claimed, the wrong result follows from that, and is a detail of that finding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import counted_from
from shardviz.check.order.rules.intent import order_of
from shardviz.check.report import NotChecked, is_of_places, unhidden
from shardviz.dump.arrays import MAX_ELEMENTS, expand_runs
from shardviz.errors import DumpError
from shardviz.explain.finding import Finding
from shardviz.explain.placement.whole_run import GatheredOutOfOrder
from shardviz.explain.step.sums import WrongCollective
from shardviz.explain.templates import number
from shardviz.layout.notation import write
from shardviz.layout.region import Region, index_of
from shardviz.relate.relations import RankPair
from shardviz.relate.tolerance import SINGLE
from shardviz.relate.values import padded_to
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard
    from shardviz.dump.records.step import CallRecord
    from shardviz.dump.records.tensors import GatherRecord, Stamp
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh

    Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A rank that has something else after a collective than is defined."""

    call: CallRecord
    after: Values
    expected: Values


@dataclass(frozen=True)
class CallResults(RankPair):
    """What ranks have after a collective, compared with what its definition gives them.

    Attributes:
        wrong: The ranks that have something else.
    """

    wrong: Mapping[int, Wrong]

    @property
    def ranks(self) -> tuple[int, ...]:
        """These ranks, rising."""
        return tuple(sorted(self.wrong))

    def wanted_of(self, rank: int) -> Values:
        """Return what a rank should have."""
        return self.wrong[rank].expected

    def held_of(self, rank: int) -> Values:
        """Return what a rank has."""
        return self.wrong[rank].after


MAX_SHOWN = 8

DEFINITIONS: Mapping[str, Callable[[Values, int], Values | None]] = {
    "broadcast": lambda before, me: before[0],
    "reduce": lambda before, me: None if me else before.sum(0),
    "all_reduce": lambda before, me: before.sum(0),
    "scatter": lambda before, me: np.split(before[0], len(before))[me],
    "gather": lambda before, me: None if me else before,
    "all_gather": lambda before, me: before,
    "reduce_scatter": lambda before, me: np.split(before.sum(0), len(before))[me],
    "all_to_all": lambda before, me: np.concatenate([np.split(row, len(before))[me] for row in before]),
    "send_recv": lambda before, me: before[me - 1],
}
"""What rank `me` of a group has after a collective, of what all had before, `[size, ...]`; the root is the first.

`send_recv` is a ring: each gets what the rank before it had, the first what the last had.
"""


def check_collectives(dump: Dump) -> Iterator[Finding | NotChecked]:
    """Yield the collectives of a step that did not give what they are defined to give, once for all groups."""
    wrong: dict[tuple[str, str], dict[int, Wrong]] = {}
    for call in calls_of(dump):
        try:
            wrong.setdefault((call.module, call.op), {}).update(wrong_after(dump, call))
        except (DumpError, ValueError) as error:
            yield NotChecked(call.module, f"{call.op} over ranks {listed(call.ranks, MAX_SHOWN)}: {error}", "step")
    mesh = dump.files.mesh
    yield from (_finding(mesh, module, op, ranks) for (module, op), ranks in wrong.items() if ranks)


def calls_of(dump: Dump) -> list[CallRecord]:
    """Return the calls of a step whose results were written down, each once."""
    return list(dict.fromkeys(call for rank in dump.files.ranks.values() for call in rank.calls))


def wrong_after(dump: Dump, call: CallRecord) -> dict[int, Wrong]:
    """Return the ranks of a group that have something else than is defined.

    Raises:
        DumpError: The dump does not have what the ranks had.
        ValueError: They had tensors of different shapes, or such as cannot be parted.
    """
    if call.op not in DEFINITIONS:
        raise ValueError(f"shardviz has no definition of {call.op}")
    before = np.stack([values_of(dump, f"{call.module}.before", rank) for rank in call.ranks])
    wrong = {}
    for me, rank in enumerate(call.ranks):
        expected = DEFINITIONS[call.op](before, me)
        if expected is not None:
            after = values_of(dump, call.module, rank)
            if after.shape != expected.shape or not np.allclose(after, expected, rtol=SINGLE, atol=0):
                wrong[rank] = Wrong(call, after, expected)
    return wrong


def values_of(dump: Dump, name: str, rank: int) -> Values:
    """Return a rank's values of a step, by their name.

    Raises:
        DumpError: It wrote none.
    """
    tensor = dump.find("step", "activation", name)
    if tensor is None or rank not in tensor.shards:
        raise DumpError(f"rank {rank} wrote no {name}")
    return dump.values(tensor.shards[rank], name)


def _finding(mesh: Mesh, module: str, op: str, ranks: Mapping[int, Wrong]) -> Finding:
    rank, first = next(iter(sorted(ranks.items())))
    axes = mesh.axes_within(first.call.ranks)
    over = f"over ranks {listed(first.call.ranks, MAX_SHOWN)}"
    group = f"along {' and '.join(axes)}, {over}," if axes else over
    finding = WrongCollective().finding(
        module,
        tuple(sorted(ranks)),
        f"{op} {group} gave rank {rank} {_shown(first.after)}; the ranks' inputs give {_shown(first.expected)}",
    )
    return finding.seen_in(CallResults(ranks))


def _shown(values: Values) -> str:
    return f"[{listed(map(number, values.ravel()), MAX_SHOWN)}]"


Gatherings = dict[tuple[str, str], dict[int, "GatherRecord"]]
"""By name and collective: what the ranks got that is not the tensor in order."""


@dataclass(frozen=True)
class Gathered(RankPair):
    """What ranks got of a collective of torch that should give back a tensor, and the tensor.

    Attributes:
        records: What each rank got that is not the tensor in order.
    """

    dump: Dump
    stamp: Stamp
    call: str
    records: dict[int, GatherRecord]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that got something else."""
        return tuple(self.records)

    def wanted_of(self, rank: int) -> NDArray[np.int64]:
        """Return the ids of the tensor in order, from 1."""
        return np.arange(1, math.prod(self.stamp.shape) + 1).reshape(self.stamp.shape)

    def held_of(self, rank: int) -> NDArray[np.int64]:
        """Return the ids that a rank got, row-major.

        Raises:
            DumpError: It got an error, or something of another shape.
        """
        record = self.records[rank]
        ids = gathered_ids(self.dump, self.stamp, record) if not record.error else None
        if ids is None:
            what = f"raised {record.error}" if record.error else "gave a tensor of a different shape"
            raise DumpError(f"{self.stamp.name}: {self.call}() {what} on rank {rank}")
        return ids.reshape(self.stamp.shape) if ids.size == math.prod(self.stamp.shape) else ids


def check_gathered(dump: Dump, placed: Iterable[Finding | NotChecked]) -> list[Finding | NotChecked]:
    """Add what collectives return to shards' findings, and find wrong collectives.

    Collectives are findings of their own if the shards that they gather are right.

    What is gathered of shards whose own order could not be checked shows nothing.
    """
    placed = list(placed)
    wrong, calls = wrongly_gathered(dump)
    unknown = {result.tensor for result in placed if isinstance(result, NotChecked) and result.about == "order"}
    shards = [
        _with_consequence(dump, result, wrong, calls) if isinstance(result, Finding) else result for result in placed
    ]
    return [
        *shards,
        *unhidden(
            [_of_gathering(dump, *call, ranks) for call, ranks in wrong.items() if call[0] not in unknown],
            shards,
        ),
    ]


def wrongly_gathered(dump: Dump) -> tuple[Gatherings, set[tuple[str, str]]]:
    """Return the results that are wrong, and the names and collectives of all results.

    What several ranks got alike is looked at once: laid out it is as large as the tensor.
    """
    wrong: Gatherings = {}
    calls: set[tuple[str, str]] = set()
    judged: dict[tuple[GatherRecord, Region | None], bool] = {}
    for rank, record in sorted(dump.files.ranks.items()):
        for gathered in record.gathered:
            key = (gathered.name, gathered.collective)
            calls.add(key)
            tensor = dump.stamped.get(gathered.name)
            stamped = tensor.shards.get(rank) if tensor is not None else None
            if stamped is not None and stamped.layout is None:
                continue  # a part that nothing claims a place for: what is gathered of it is that part
            shard = _part(stamped) if stamped is not None else None
            if (gathered, shard) not in judged:
                is_part = shard is not None and gathered.held == shard.dims
                judged[gathered, shard] = is_part or _is_right(dump, gathered)
            if not judged[gathered, shard]:
                wrong.setdefault(key, {})[rank] = gathered
    return wrong, calls


def _part(shard: Shard) -> Region | None:
    """Return a rank's part of a tensor on its own mesh, if code cut it along an unknown axis."""
    layout = shard.layout
    if layout is None or not layout.own_axes or {*layout.split_axes} <= {*layout.own_axes}:
        return None
    chains = tuple(tuple(link for link in chain if link not in layout.own_axes) for chain in layout.chains)
    return replace(layout, chains=chains).region_of_rank(shard.rank)


def _is_right(dump: Dump, gathered: GatherRecord) -> bool:
    """Whether a collective gave a tensor in order, or one whose elements were not stamped."""
    stamp = dump.stamps.get(gathered.name)
    if gathered.error or stamp is None:
        return not gathered.error
    is_whole = gathered.held is not None and gathered.held == Region.whole(stamp.shape).dims
    return (is_whole and order_of(dump, gathered.name) is None) or _is_in_order(dump, stamp, gathered)


def _with_consequence(dump: Dump, finding: Finding, wrong: Gatherings, calls_seen: set[tuple[str, str]]) -> Finding:
    if not is_of_places(finding):
        return finding
    calls = [call for name, call in calls_seen if name == finding.tensor]
    clauses = [
        f"{call}() {_gathered_text(dump, finding.tensor, wrong[finding.tensor, call])}"
        if (finding.tensor, call) in wrong
        else f"{call}() still gives it back in order"
        for call in sorted(calls)
    ]
    return replace(finding, details=(*finding.details, *clauses))


def _gathered_text(dump: Dump, name: str, ranks: dict[int, GatherRecord]) -> str:
    rank, gathered = next(iter(ranks.items()))
    error = f"raised {gathered.error}" if gathered.error else ""
    return error or f"gives {_difference(dump, dump.stamps[name], rank, gathered)}"


def _of_gathering(dump: Dump, name: str, call: str, ranks: dict[int, GatherRecord]) -> Finding:
    claimed = _claimed(dump, name)
    shapes = {region.shape for _, region in claimed.regions()} if claimed is not None else set()
    cause = GatheredOutOfOrder(is_uneven=len(shapes) > 1)
    axes = [axis for axis in claimed.split_axes if claimed.mesh.axis_size(axis) > 1] if claimed is not None else []
    over = f", which gathers over {' and '.join(axes)}," if axes else ""
    return cause.finding(
        name,
        tuple(ranks),
        f"the shards are as claimed, but {call}(){over} {_gathered_text(dump, name, ranks)}",
        claimed=write(claimed) if claimed is not None else "",
    ).seen_in(Gathered(dump, dump.stamps[name], call, ranks))


def _claimed(dump: Dump, name: str) -> Layout | None:
    tensor = dump.stamped.get(name)
    return tensor.claimed if tensor is not None else None


def _is_in_order(dump: Dump, stamp: Stamp, gathered: GatherRecord) -> bool:
    """Whether the gathered tensor is in its own or the expected order."""
    ids = gathered_ids(dump, stamp, gathered)
    ids_in_order = np.arange(1, math.prod(stamp.shape) + 1).reshape(stamp.shape)
    claimed = _claimed(dump, gathered.name)
    whole = ids_in_order if claimed is None else padded_to(ids_in_order, claimed.shape)
    return ids is not None and np.array_equal(ids, whole.ravel())


def _difference(dump: Dump, stamp: Stamp, rank: int, gathered: GatherRecord) -> str:
    """Say how many elements are out of place, and where the first one is."""
    numel = math.prod(stamp.shape)
    ids = gathered_ids(dump, stamp, gathered)
    if ids is None:
        return "a tensor of a different shape than the one that was split"
    if len(ids) != numel:
        return f"{len(ids):,} elements of {numel:,} on rank {rank}"
    wrong = np.flatnonzero(ids != np.arange(1, numel + 1))
    at = int(wrong[0])
    held, position = int(ids[at]), index_of(at, stamp.shape)
    content = "none of its elements"
    if 1 <= held <= numel:
        content = f"the element that belongs at {index_of(held - 1, stamp.shape)}"
    return f"{len(wrong):,} of {numel:,} elements out of place: on rank {rank}, position {position} holds {content}"


def gathered_ids(dump: Dump, stamp: Stamp, gathered: GatherRecord) -> NDArray[np.int64] | None:
    """Return the ids that came back, from 1 in the expected order; None if too many."""
    order = order_of(dump, gathered.name)
    ids = _own_ids(dump, stamp, gathered)
    return ids if order is None or ids is None else order.places(ids, stamp.shape)


def _own_ids(dump: Dump, stamp: Stamp, gathered: GatherRecord) -> NDArray[np.int64] | None:
    """Return the ids that came back, from 1 in the tensor's order; None if too many."""
    if gathered.held is not None:
        region = Region(gathered.held)
        fits = len(gathered.held) == len(stamp.shape) and region.size <= MAX_ELEMENTS
        return region.flat_ids(stamp.shape).ravel() + 1 if fits else None
    runs = gathered.runs or ()
    if sum(run[2] for run in runs) > MAX_ELEMENTS:
        return None
    ids = expand_runs(runs)
    without_padding = ids[ids != 0]  # zeros pad
    first = stamp.first
    if without_padding.size:
        first = counted_from(dump, stamp, int(without_padding.min()), int(without_padding.max()))
    return np.where(ids == 0, 0, ids - first + 1)
