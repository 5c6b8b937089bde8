"""Do two jobs begin their step with the same weights, and are their models given the same rows?"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.orders import name_order
from shardviz.check.step.trace.traces import Kept, in_both, largest_of
from shardviz.explain.step.whole_step import DifferentBatch, SharedRows
from shardviz.groups import the_only
from shardviz.layout.candidates import shared_placements
from shardviz.layout.dtypes import HALVES
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import ranks_by
from shardviz.layout.region import Region, merge_ranges
from shardviz.relate.casts import rounding_between
from shardviz.relate.orders import orders_of_slices, places_of
from shardviz.relate.values import magnitude
from shardviz.text import join_numbers, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.trace.traces import OfRank, Weight
    from shardviz.dump.records.base import Moment
    from shardviz.explain.cause import Cause
    from shardviz.layout.candidates import Placements
    from shardviz.layout.mesh import Mesh

MOST_SHARES = 4
"""Ranks whose rows are listed."""


@dataclass(frozen=True, slots=True)
class OtherWeight:
    """A weight that is another one in the second job before the step.

    Attributes:
        rank: The first rank that has something else.
        apart: How far it is off, relative to the largest element; infinite if its shape fits nothing.
        is_permuted: Whether ranks have the first job's numbers and no others, at other places.
        holds: The first job's weight whose values it has; empty if none.
        order: The order of its elements, in words; empty if unknown.
        rounded: The dtype to which the values of one of the jobs are rounded; empty if they are not.
    """

    name: str
    rank: int
    apart: float
    is_permuted: bool
    holds: str = ""
    order: str = ""
    rounded: str = ""

    @property
    def has_relation(self) -> bool:
        """Whether it is known what it is of the first job's weights."""
        return bool(self.holds or self.is_permuted or self.rounded)


@dataclass(frozen=True, slots=True)
class Belonging:
    """Where the parts of a weight belong that claims nothing, as far as the first job's values say it.

    Attributes:
        layout: A split over the mesh; None if the parts are no such split.
        regions: The part that each rank has: by heads, for one, of a fused weight.
    """

    layout: Layout | None
    regions: Mapping[int, Region]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to put a weight together.

    Attributes:
        placements: How ranks share it along each axis.
        weight: The whole.
        order: The rows of the parts, one behind the other, in the whole's order; None if that is their own.
    """

    placements: Placements
    weight: Weight
    order: NDArray[np.int64] | None = None


def belongings_of(
    full: Mapping[str, Weight], parts: Mapping[str, Mapping[int, Weight]], mesh: Mesh
) -> dict[str, Belonging]:
    """Return where weights belong that claim nothing.

    Args:
        full: The first job's weights.
        parts: What ranks of the second have of each.
    """
    plain = [name for name in parts if name in full and all(part.layout is None for part in parts[name].values())]
    belongings = {name: _belonging(full[name], parts[name], mesh) for name in plain}
    return {name: belonging for name, belonging in belongings.items() if belonging is not None}


def _belonging(whole: Weight, parts: Mapping[int, Weight], mesh: Mesh) -> Belonging | None:
    values_by_rank = {rank: part.values for rank, part in parts.items() if part.values is not None}
    placements = _split_of(whole.values, values_by_rank, mesh, _allowed) if whole.values is not None else None
    if placements is None:
        return _by_rows(whole, parts)
    layout = Layout.from_placements(mesh, whole.shape, placements)
    return Belonging(layout, dict(layout.regions()))


def chosen_weight(ways: Sequence[Way], parts: Mapping[int, Weight], mesh: Mesh) -> Way:
    """Return the assembly of a plain weight that matches the other job's; else the first one."""
    every = [*ways, *(reordered for one in ways if (reordered := _in_order_of(one, parts)) is not None)]
    for way in every if len(every) > 1 and parts else ():
        is_plain = all(part.layout is None for part in parts.values())
        belonging = _belonging(way.weight, parts, mesh) if is_plain else None
        if (belonging is not None or not is_plain) and _other("", way.weight, parts, belonging) is None:
            return way
    return ways[0]


def _in_order_of(way: Way, parts: Mapping[int, Weight]) -> Way | None:
    """Return a weight with its rows in the order of a rank that has them all: ranks may be given heads of each part."""
    whole = way.weight.values
    for rank_weight in parts.values():
        copy = rank_weight.values
        if whole is None or copy is None or copy.shape != whole.shape or not (whole.is_whole and copy.is_whole):
            continue
        dim, rows = places_of(copy.values, whole.values, _allowed(whole, copy)) or (-1, np.arange(0))
        if dim == 0 and sorted(rows) == list(range(len(rows))):
            return Way(way.placements, replace(way.weight, values=whole.reordered(rows)), rows)
    return None


def _by_rows(whole: Weight, parts: Mapping[int, Weight]) -> Belonging | None:
    """Return which slices of a weight ranks have; None unless all together have each slice."""
    dims, regions = set(), {}
    every: set[int] = set()
    for rank, rank_weight in parts.items():
        part = rank_weight.values
        if whole.values is None or part is None or not (whole.values.is_whole and part.is_whole):
            return None
        location = places_of(part.values, whole.values.values, _allowed(whole.values, part))
        if location is None or np.any(location[1] < 0) or np.any(np.diff(location[1]) <= 0):
            return None  # slices that a rank has in another order are in no region
        dim, at = location
        spans = merge_ranges((row, row + 1) for row in at.tolist())
        around = Region.whole(whole.shape).dims
        regions[rank] = Region((*around[:dim], spans, *around[dim + 1 :]))
        dims.add(dim)
        every |= set(at.tolist())
    return Belonging(None, regions) if len(dims) == 1 and len(every) == whole.shape[dims.pop()] else None


def _split_of(
    whole: Kept, parts: Mapping[int, Kept], mesh: Mesh, allowed: Callable[[Kept, Kept], float]
) -> Placements | None:
    """Return the split over a mesh that gives every rank its part of a tensor; None if there is none."""

    def fits(rank: int, region: Region) -> bool:
        return _apart(whole, parts[rank], region) <= allowed(whole, parts[rank])

    return shared_placements(whole.shape, {rank: part.shape for rank, part in parts.items()}, mesh, fits)


def other_weights(
    full: Mapping[str, Weight], parts: Mapping[str, Mapping[int, Weight]], belongings: Mapping[str, Belonging]
) -> tuple[list[OtherWeight], int]:
    """Return the weights that differ before the step, and how many could be compared."""
    held = {name for name, own in parts.items() if any(part.values is not None for part in own.values())}
    shared_names = [name for name, whole in full.items() if name in held and whole.values is not None]
    others = [
        _related(other, full, _whole_of(full[name], parts[name], belongings.get(name)))
        for name in shared_names
        if (other := _other(name, full[name], parts[name], belongings.get(name))) is not None
    ]
    return others, len(shared_names)


def repeated_weight(
    others: Sequence[OtherWeight], full: Mapping[str, Weight], parts: Mapping[str, Mapping[int, Weight]]
) -> OtherWeight | None:
    """Return the first weight of which every rank has the same values for a part that is smaller than the whole."""
    for other in others:
        held, whole = [part.values for part in parts[other.name].values() if part.values is not None], full[other.name]
        is_part = all(math.prod(part.shape) < math.prod(whole.shape) for part in held)
        is_repeated = all(np.array_equal(part.values, held[0].values) for part in held[1:])
        if is_part and is_repeated and len(held) > 1 and np.ptp(held[0].values) > 0:
            return other
    return None


def farthest_weights(
    full: Mapping[str, Weight], parts: Mapping[str, Mapping[int, Weight]], belongings: Mapping[str, Belonging]
) -> tuple[float, float]:
    """Return how far weights that agree are apart at most, relative to their largest elements, and may be."""
    farthest = allowed = 0.0
    for name, whole in full.items():
        for rank, part in parts.get(name, {}).items():
            if whole.values is None or part.values is None:
                continue
            near, apart = _allowed(whole.values, part.values), _apart_on(rank, whole.values, part, belongings.get(name))
            if 0 < apart <= near:
                farthest, allowed = max(farthest, apart), max(allowed, near)
    return farthest, allowed


def _related(other: OtherWeight, full: Mapping[str, Weight], held: NDArray[np.float64] | None) -> OtherWeight:
    """Say what a weight that differs is of the first job's, given all of it."""
    expected = full[other.name].values
    if held is None or expected is None or not expected.is_whole or np.ptp(held) == 0:
        return other
    for name, weight in full.items():
        if weight.values is not None and np.array_equal(weight.values.values, held):
            return replace(other, holds=name)
    before, after = (np.ascontiguousarray(values + 0.0).view(np.uint64) for values in (expected.values, held))
    for old, new in ((before, after), (after, before)):
        if rounding := rounding_between(old, "float64", new, "float64", HALVES):
            return replace(other, rounded=rounding.dtype)
    orders = orders_of_slices(before, after)
    moved = [(dim, order) for dim, order in enumerate(orders or ()) if (order != np.arange(len(order))).any()]
    words = [name_order(order, dim)[1] for dim, order in moved]
    return replace(other, order="; ".join(words), is_permuted=other.is_permuted or bool(words))


def _whole_of(weight: Weight, parts: Mapping[int, Weight], belonging: Belonging | None) -> NDArray[np.float64] | None:
    """Return a weight put together from all ranks; None if copies differ or a part of it is not known."""
    whole = np.full(math.prod(weight.shape), np.nan)
    for rank, part in parts.items():
        if part.values is None or not part.values.is_whole or (part.layout is not None and part.layout.flat):
            return None
        region = _region_of(rank, part, belonging, weight.shape)
        if region.shape != part.values.shape or not region.is_within(weight.shape):
            return None
        ids, held = region.flat_ids(weight.shape).ravel(), part.values.values.ravel()
        known = ~np.isnan(whole[ids])
        if not np.array_equal(whole[ids][known], held[known]):
            return None
        whole[ids] = held
    return None if np.isnan(whole).any() else whole.reshape(weight.shape)


def _region_of(rank: int, part: Weight, belonging: Belonging | None, shape: tuple[int, ...]) -> Region:
    """Return the region of a weight that a rank's part is claimed, or was found, to be."""
    if part.layout is not None:
        return part.layout.region_of_rank(rank)
    return belonging.regions[rank] if belonging is not None else Region.whole(shape)


def _other(name: str, whole: Weight, parts: Mapping[int, Weight], belonging: Belonging | None) -> OtherWeight | None:
    for rank, rank_weight in parts.items():
        if whole.values is None or rank_weight.values is None:
            continue
        apart = _apart_on(rank, whole.values, rank_weight, belonging)
        if apart > _allowed(whole.values, rank_weight.values):
            return OtherWeight(name, rank, apart, _is_permuted(whole.values, parts.values()))
    return None


def _apart_on(rank: int, whole: Kept, part: Weight, belonging: Belonging | None) -> float:
    """Return how far a rank's part is off, relative to the largest element."""
    assert part.values is not None
    return _apart(*_expected_on(rank, whole, part, belonging))


def _expected_on(rank: int, whole: Kept, part: Weight, belonging: Belonging | None) -> tuple[Kept, Kept, Region]:
    """Return a weight, flattened if a rank has a stretch of it, what the rank has, and which region that is."""
    assert part.values is not None
    is_flat = part.layout is not None and part.layout.flat
    return _flat(whole) if is_flat else whole, part.values, _region_of(rank, part, belonging, whole.shape)


def moves_apart(whole: Weight, parts: Mapping[int, Weight], belonging: Belonging | None) -> NDArray[np.float64] | None:
    """Return how far each element that ranks have of a weight is off; None if a part's shape is not as expected."""
    apart = []
    for rank, part in parts.items():
        if whole.values is None or part.values is None:
            continue
        expected, held, region = _expected_on(rank, whole.values, part, belonging)
        if region.shape != held.shape or not region.is_within(expected.shape):
            return None
        pair = in_both(expected, held, region)
        apart += [np.abs(pair[1] - pair[0]).ravel()] if pair is not None else []
    return np.concatenate(apart) if apart else None


def _is_permuted(whole: Kept, parts: Iterable[Weight]) -> bool:
    """Whether every rank has a weight's numbers and no others; a few ranks may if a seed drew them later."""
    all_values = [part.values.values for part in parts if part.values is not None]
    are_known = all(np.isin(values, whole.values).all() for values in all_values)
    return are_known and any(values.size and np.ptp(values) > 0 for values in all_values)


def _flat(whole: Kept) -> Kept:
    """Return a tensor flattened, as FSDP1 has it; as it is if only a sample of it was kept."""
    if not whole.is_whole:
        return whole
    flat = whole.values.ravel()
    return replace(whole, shape=flat.shape, at=(np.arange(len(flat)),), values=flat)


def _apart(whole: Kept, shard: Kept, region: Region) -> float:
    """Return how far a part is off, relative to the largest element; infinite if it is not of that shape."""
    if region.shape != shard.shape or not region.is_within(whole.shape):
        return float("inf")
    pair = in_both(whole, shard, region)
    if pair is None or not pair[0].size:
        return 0.0
    apart = magnitude(pair[0] - pair[1])
    return apart / (largest_of(whole) or 1.0) if np.isfinite(apart) else float("inf")


def _allowed(whole: Kept, part: Kept) -> float:
    """Return how far equal weights may differ: by a rounding if their dtypes differ or they were stepped, else 0."""
    is_exact = whole.dtype == part.dtype and not part.is_stepped
    return 0.0 if is_exact else _near(whole, part)


def by_name(ranks: Mapping[int, OfRank], role: str, moment: Moment = "step") -> dict[str, dict[int, Weight]]:
    """Return ranks' weights before the step, "updated" ones, or gradients, by name."""
    parts: dict[str, dict[int, Weight]] = {}
    for rank, of_rank in ranks.items():
        for name, weight in of_rank.weights(role, moment):
            parts.setdefault(name, {})[rank] = weight
    return parts


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of the first job's batch the ranks of the second were given.

    Attributes:
        order: The first job's rows in the order in which ranks have them; None if that is their own.
        problem: In what the batches differ, in a sentence; empty if they do not.
        not_joined: How ranks share the batch, if that is right and their parts cannot be put together; else empty.
        cause: Why they differ.
    """

    order: NDArray[np.int64] | None = None
    problem: str = ""
    not_joined: str = ""
    cause: Cause = field(default_factory=lambda: DifferentBatch(of_jobs=True))


def rows_of(whole_batch: list[Kept], batches: Mapping[int, list[Kept]], mesh: Mesh) -> Rows:
    """Compare what both models are given: each rank a split of it, or rows of it in any order.

    The first input that ranks have fewer rows of is the batch. The state of an LSTM has them along another dim.
    """
    inputs = list(zip(whole_batch, *batches.values(), strict=False)) if batches else []
    if not inputs or _are_split(whole_batch, batches, mesh):
        return Rows()
    whole, *of_ranks = next((each for each in inputs if _are_of_rows(*each)), inputs[0])
    given = dict(zip(batches, of_ranks, strict=True))
    rows = {rank: _rows(whole, own) for rank, own in given.items()}
    unknown = [rank for rank, known in rows.items() if known is None]
    size = next(iter(whole.shape), 0)
    if unknown and _are_padded_parts(whole, of_ranks):
        shapes = f"{list(given[unknown[0]].shape)} of the other job's {list(whole.shape)}"
        return Rows(not_joined=f"rank {unknown[0]} was given {shapes}, and the last ranks' parts are padded")
    if unknown and _are_cut_alone(whole, of_ranks):
        lengths = f"{given[unknown[0]].shape[1]} of {whole.shape[1]}"
        own = f"rank {unknown[0]} was given the other job's rows padded or cut to a length of its own"
        return Rows(not_joined=f"{own}, {lengths}")
    if unknown:
        shapes = f"{list(given[unknown[0]].shape)} and {list(whole.shape)}"
        text = f"rank {unknown[0]} of it was given rows that are not in the other job's batch ({shapes})"
        return Rows(problem=text)
    shares = {rank: tuple(known.tolist()) for rank, known in rows.items() if known is not None}
    parts = list(dict.fromkeys(shares.values()))
    every = [row for part in parts for row in part]
    if len(set(every)) < size:
        return _incomplete(shares, size, mesh)
    if len(every) > size:
        again = {row for row, count in Counter(every).items() if count > 1}
        text = f"rows {join_numbers(again)} of the other job's {size} were given to several ranks: {_shares(shares)}"
        return Rows(problem=text)
    if len({len(part) for part in parts}) > 1:
        return Rows(not_joined=f"ranks were given unequal numbers of the other job's {size} rows: {_shares(shares)}")
    return Rows(np.array(every, np.int64))


def _are_of_rows(whole: Kept, *parts: Kept) -> bool:
    """Whether some ranks have fewer slices than a tensor along dim 0, and all the same sizes along the others."""
    are_alike = all(part.shape and part.shape[1:] == whole.shape[1:] for part in parts)
    return are_alike and any(part.shape[0] < whole.shape[0] for part in parts)


def _are_padded_parts(whole: Kept, parts: Sequence[Kept]) -> bool:
    """Whether ranks have all slices of the batch along a dim, and constant slices behind the last of them."""
    if not whole.is_whole or not all(part.is_whole for part in parts):
        return False
    every: dict[int, list[int]] = {}
    is_padded = False
    for part in parts:
        place = places_of(part.values, whole.values, _near(whole, part) * (largest_of(whole) or 1.0))
        if place is None or np.any(np.diff(place[1] < 0) < 0):
            return False
        dim, at = place
        padding = np.compress(at < 0, part.values, axis=dim)
        if padding.size and np.ptp(padding):
            return False
        is_padded |= bool(padding.size)
        every.setdefault(dim, []).extend(at[at >= 0].tolist())
    return is_padded and any(sorted(indices) == list(range(whole.shape[dim])) for dim, indices in every.items())


def _are_cut_alone(whole: Kept, parts: Sequence[Kept]) -> bool:
    """Whether ranks have all rows of the batch, some of them without their ends."""
    at: list[int] = []
    for part in parts:
        if len(part.shape) != len(whole.shape) or len(part.shape) < 2 or part.shape[1] > whole.shape[1]:
            return False
        length, tail = part.shape[1], whole.shape[1] - part.shape[1]
        columns = whole.at[1][: whole.values.shape[1] - tail]
        shape, kept = (whole.shape[0], *part.shape[1:]), (whole.at[0], columns, *whole.at[2:])
        cut = Kept(shape, kept, whole.values[:, :length], whole.dtype)
        rows = _rows(cut, part) if whole.is_whole and part.shape[2:] == whole.shape[2:] else None
        if rows is None:
            return False
        at += rows.tolist()
    return sorted(at) == list(range(whole.shape[0]))


def _shares(rows: Mapping[int, tuple[int, ...]]) -> str:
    """Say which rows ranks were given, those with the same rows together."""
    ranks_of = ranks_by(rows.items()).items()
    return listed((f"{named_ranks(ranks)} rows {join_numbers(given)}" for given, ranks in ranks_of), MOST_SHARES)


def _incomplete(rows: Mapping[int, tuple[int, ...]], size: int, mesh: Mesh) -> Rows:
    """Say which rows each rank was given, and along which axes they are the same, if some rows were given to none."""
    ranks_of = ranks_by(rows.items())
    given = {row for rows_of_rank in ranks_of for row in rows_of_rank}
    equal = [
        axis
        for axis in mesh.long_axes
        if all(len({rows.get(rank) for rank in group}) == 1 for group in mesh.groups(axis))
    ]
    every = [axes for number in range(1, len(equal) + 1) for axes in combinations(equal, number)]
    fitting = [axes for axes in every if len(given) * mesh.size_over(axes) == size]
    axes = the_only(fitting) or ()
    sentence = (
        f"its ranks were given {len(given)} of the other job's {size} rows: {_shares(rows)}; no rank was "
        f"given rows {join_numbers(set(range(size)) - given)}"
    )
    are_slices = all(np.all(np.diff(rows_of_rank) == 1) for rows_of_rank in ranks_of)
    is_shared = bool(axes) or (are_slices and sum(map(len, ranks_of)) > len(given))
    return Rows(problem=sentence, cause=SharedRows(axes)) if is_shared else Rows(problem=sentence)


def _are_split(whole_batch: list[Kept], batches: Mapping[int, list[Kept]], mesh: Mesh) -> bool:
    """Whether a split of each tensor over the mesh gives all ranks what they were given."""
    return all(len(own) == len(whole_batch) for own in batches.values()) and all(
        _split_of(whole, {rank: own[index] for rank, own in batches.items()}, mesh, _near) is not None
        for index, whole in enumerate(whole_batch)
    )


def _near(whole: Kept, part: Kept) -> float:
    return max(whole.tolerance, part.tolerance)


def _rows(whole: Kept, rows: Kept) -> NDArray[np.int64] | None:
    """Return the rows of the whole batch that a rank was given; None if one isn't in it."""
    if not (whole.is_whole and rows.is_whole) or whole.shape[1:] != rows.shape[1:] or not rows.shape:
        return None
    used: set[int] = set()
    at = []
    for row in rows.values:
        near = _near(whole, rows) * (largest_of(whole) or 1.0)
        apart = np.abs(whole.values - row).reshape(len(whole.values), -1).max(axis=1, initial=0.0)
        free = [index for index in np.flatnonzero(apart <= near).tolist() if index not in used]
        if not free:
            return None
        at.append(free[0])
        used.add(free[0])
    return np.array(at, np.int64)
