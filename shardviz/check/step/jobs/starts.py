"""The weights with which two jobs begin a step, compared; and which part of a weight a rank has that claims nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.orders import name_order
from shardviz.check.step.trace.traces import JobTrace, Kept, Weight, in_both, largest_of, rounded_to
from shardviz.dump.records.trace import is_value
from shardviz.layout.dtypes import HALVES
from shardviz.layout.layout import Layout, Placements, shared_placements
from shardviz.layout.region import Region, merge_ranges
from shardviz.relate.casts import rounding_between
from shardviz.relate.orders import orders_of_slices, places_of
from shardviz.relate.tolerance import EPSILON
from shardviz.relate.values import magnitude

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.line_values import OrderInCalls
    from shardviz.check.step.jobs.other_steps import History
    from shardviz.layout.mesh import Mesh

    PartsByName = Mapping[str, Mapping[int, Weight]]

SOME_NUMBERS = 256
"""So many different numbers of a weight are enough to tell its elements apart by."""


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


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of both jobs.

    Attributes:
        params: Those of the job that the other is compared with, whole.
        grads: Their gradients.
        updated: The weights after the optimizer's step.
        parts: The weights that ranks of the other job have.
        belongings: Where those of these belong that claim nothing.
        order: Which of the batch's rows the other job's ranks have in a call; None if lines can't be compared.
        ways: How those of the first job were put together.
        kept: Which share of each rank's gradients clipping left in the other job, if they are compared without it.
        histories: What is known of the gradients of weights in the steps before.
    """

    params: Mapping[str, Weight]
    grads: Mapping[str, Weight]
    updated: Mapping[str, Weight]
    parts: PartsByName
    belongings: Mapping[str, Belonging]
    order: OrderInCalls | None = None
    ways: Mapping[str, Way] = field(default_factory=dict)
    kept: Mapping[int, float] = field(default_factory=dict)
    histories: Mapping[str, History] = field(default_factory=dict)


def belongings_of(full: Mapping[str, Weight], parts: PartsByName, mesh: Mesh) -> dict[str, Belonging]:
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
    placements = split_of(whole.values, values_by_rank, mesh, _allowed) if whole.values is not None else None
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
        location = _places_of(whole.values, part)
        if location is None or np.any(location[1] < 0) or np.any(np.diff(location[1]) <= 0):
            return None  # slices that a rank has in another order are in no region
        dim, at = location
        spans = merge_ranges((row, row + 1) for row in at.tolist())
        around = Region.whole(whole.shape).dims
        regions[rank] = Region((*around[:dim], spans, *around[dim + 1 :]))
        dims.add(dim)
        every |= set(at.tolist())
    return Belonging(None, regions) if len(dims) == 1 and len(every) == whole.shape[dims.pop()] else None


def _places_of(whole: Kept, part: Kept) -> tuple[int, NDArray[np.int64]] | None:
    """Return a dim, and where each slice of a part stands along it; of a vector only if its numbers are all apart."""
    near = _allowed(whole, part)
    if part.values.ndim != 1 or whole.values.ndim != 1 or not part.values.size:
        return places_of(part.values, whole.values, near)
    near *= largest_of(whole)
    order = np.argsort(whole.values)
    numbers = whole.values[order]
    if len(numbers) < 2 or not np.all(np.diff(numbers) > 2 * near):
        return None
    above = np.clip(np.searchsorted(numbers, part.values), 1, len(numbers) - 1)
    is_below = part.values - numbers[above - 1] < numbers[above] - part.values
    at = order[above - is_below]
    return 0, np.where(np.abs(whole.values[at] - part.values) <= near, at, -1)


def split_of(
    whole: Kept, parts: Mapping[int, Kept], mesh: Mesh, allowed: Callable[[Kept, Kept], float]
) -> Placements | None:
    """Return the split over a mesh that gives every rank its part of a tensor; None if there is none."""

    def fits(rank: int, region: Region) -> bool:
        return _apart(whole, parts[rank], region) <= allowed(whole, parts[rank])

    return shared_placements(whole.shape, {rank: part.shape for rank, part in parts.items()}, mesh, fits)


def are_equal_parts(whole: Kept, part: Kept, region: Region) -> bool:
    """Whether a rank's part of a weight is a region of the other job's."""
    return _apart(whole, part, region) <= _allowed(whole, part)


def other_weights(
    full: Mapping[str, Weight], parts: PartsByName, belongings: Mapping[str, Belonging]
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
    others: Sequence[OtherWeight], full: Mapping[str, Weight], parts: PartsByName
) -> OtherWeight | None:
    """Return the first weight of which every rank has the same values for a part that is smaller than the whole."""
    for other in others:
        held, whole = [part.values for part in parts[other.name].values() if part.values is not None], full[other.name]
        is_part = all(math.prod(part.shape) < math.prod(whole.shape) for part in held)
        is_repeated = all(np.array_equal(part.values, held[0].values) for part in held[1:])
        if is_part and is_repeated and len(held) > 1 and np.ptp(held[0].values) > 0:
            return other
    return None


def farthest_weights(weights: Weights) -> tuple[float, float]:
    """Return how far weights that agree are apart at most, relative to their largest elements, and may be."""
    farthest = allowed = 0.0
    for name, whole in weights.params.items():
        belonging = weights.belongings.get(name)
        for rank, part in weights.parts.get(name, {}).items():
            if whole.values is None or part.values is None:
                continue
            near, apart = _allowed(whole.values, part.values), _apart_on(rank, whole.values, part, belonging)
            if 0 < apart <= near:
                farthest, allowed = max(farthest, apart), max(allowed, near)
    return farthest, allowed


COMPUTED = ("activation", "grad")


def coarsest_of(jobs: Iterable[JobTrace]) -> str:
    """Return the coarsest dtype that any of some jobs' steps compute or reduce in.

    What single lines make doesn't count: a library may try dtypes between two steps, and only a recording of lines has
    what it makes then.
    """
    records = [record for job in jobs for record in job.records.values()]
    tensors = ((record, tensor) for record in records for tensor in record.tensors)
    bodies = (record.bodies[tensor.body] for record, tensor in tensors if not is_value(f"{tensor.name}{tensor.suffix}"))
    dtypes = {rounded_to(body.dtype, body.device) for body in bodies if body.role in COMPUTED}
    dtypes |= {dtype for record in records for dtype in record.narrowed_to}
    return max(("float64", *dtypes), key=lambda dtype: EPSILON.get(dtype, 0.0))


def dtypes_of(params: Mapping[str, Weight], parts: PartsByName) -> tuple[str, ...]:
    """Return the dtypes of both jobs' weights."""
    first = {weight.values.dtype: None for weight in params.values() if weight.values is not None}
    of_ranks = (part for of_name in parts.values() for part in of_name.values())
    second = {part.values.dtype: None for part in of_ranks if part.values is not None}
    return tuple(first | second)


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
    if not _have_places(expected.values):
        return other
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
    rank, apart = next(others_on(whole, parts, belonging), (-1, 0.0))
    if rank < 0 or whole.values is None:
        return None
    return OtherWeight(name, rank, apart, _is_permuted(whole.values, parts.values()))


def others_on(
    whole: Weight, parts: Mapping[int, Weight], belonging: Belonging | None, near: float = 0.0
) -> Iterator[tuple[int, float]]:
    """Yield ranks whose part of a weight differs, and how far it is off, relative to the largest element.

    Args:
        near: How far it may be off, if that is more than rounding.
    """
    for rank, part in parts.items():
        if whole.values is not None and part.values is not None:
            apart = _apart_on(rank, whole.values, part, belonging)
            if apart > max(near, _allowed(whole.values, part.values)):
                yield rank, apart


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


def _have_places(values: NDArray[np.float64]) -> bool:
    """Whether numbers say where they belong: if many are equal, as after a few steps by signs, they have no order."""
    return len(np.unique(values)) >= min(values.size // 4, SOME_NUMBERS)


def _is_permuted(whole: Kept, parts: Iterable[Weight]) -> bool:
    """Whether every rank has a weight's numbers and no others; a few ranks may if a seed drew them later."""
    if not _have_places(whole.values):
        return False
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
    return 0.0 if is_exact else max(whole.tolerance, part.tolerance)
