"""Arguments of modules that are no tensors of floating point: numbers, masks, positions, ids of documents.

Ranks may be given numbers of their own by intention: positions in their part, a count of their heads. So what differs
here is no finding: it may explain one about a module that goes wrong on the same ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import structs

from shardviz.check.step.trace.calls import enclosing
from shardviz.check.step.trace.traces import joined
from shardviz.dump.records.trace import ArgumentRecord, of_point
from shardviz.explain.step.modules import WrongArgument
from shardviz.groups import in_groups
from shardviz.layout.layout import num_splits, placements_of
from shardviz.layout.region import Region
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set

    from numpy.typing import NDArray

    from shardviz.check.step.trace.traces import Kept, OfRank
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.trace import KeptRecord
    from shardviz.layout.layout import Placements
    from shardviz.layout.mesh import Mesh

Argument = tuple[str, int, str]
"""A module, the number of its call, and an argument's name."""

LEAST_COUNTED = 3
"""A row of so many different numbers counts something: one of two may be a mask."""


def arguments_of_rank(rank: OfRank, counts: Mapping[str, int]) -> dict[Argument, Kept]:
    """Return what a rank's modules were given besides tensors of floating point.

    Micro-batches are joined; what is the same in all of them is there once.

    Args:
        rank: What it wrote.
        counts: How often each module is called in one forward.
    """
    records = [record for record in rank.records if record.what == "argument" and counts.get(record.module)]
    calls = in_groups(((one.module, one.call % counts[one.module], one.argument), one) for one in records)
    values = {key: [rank.activation(_name(record)) for record in of_key] for key, of_key in calls.items()}
    once = {key: parts[0] if _are_equal(parts) else joined(parts) for key, parts in values.items()}
    return {key: kept for key, kept in once.items() if kept is not None}


def _name(record: KeptRecord) -> str:
    return record.same_as or of_point(record.module, record.what, record.call, record.index)


def _are_equal(parts: Sequence[Kept | None]) -> bool:
    first, *others = parts
    return first is not None and all(one is not None and np.array_equal(one.values, first.values) for one in others)


def differing_arguments(
    whole: Mapping[Argument, Kept],
    ranks: Mapping[int, Mapping[Argument, Kept]],
    mesh: Mesh,
    called: Mapping[int, Set[str]] | None = None,
) -> dict[int, tuple[ArgumentRecord, ...]]:
    """Return for each rank the arguments that are not the unsharded model's, nor its part of them.

    Args:
        whole: The unsharded model's.
        ranks: Each rank's.
        mesh: The mesh.
        called: The modules that each rank calls: one may be given no number where the unsharded model gives it one.
    """
    differing: defaultdict[int, list[ArgumentRecord]] = defaultdict(list)
    for argument, kept in whole.items():
        parts = {rank: held[argument] for rank, held in ranks.items() if argument in held}
        for rank, record in _differing(argument, kept, parts, mesh):
            differing[rank].append(record)
    for rank, modules in (called or {}).items():
        of_whole = {argument: kept for argument, kept in whole.items() if argument[0] in modules}
        differing[rank] += _lacking(of_whole, ranks[rank], "rank")
        differing[rank] += _lacking(ranks[rank], whole, "whole")
    return {rank: tuple(records) for rank, records in differing.items() if records}


def _lacking(
    given: Mapping[Argument, Kept], other: Mapping[Argument, Kept], who: Literal["rank", "whole"]
) -> Iterator[ArgumentRecord]:
    """Yield the numbers that modules are given on one side alone: on the other one they are given None, for one."""
    for (module, call, name), kept in given.items():
        if (module, call, name) not in other and not kept.values.ndim and np.isfinite(kept.values):
            held, expected = (0.0, float(kept.values)) if who == "rank" else (float(kept.values), 0.0)
            yield ArgumentRecord(module, call, name, (), held, expected, 1, 1, dtype=kept.dtype, lacking=who)


def _differing(
    argument: Argument, whole: Kept, parts: Mapping[int, Kept], mesh: Mesh
) -> Iterator[tuple[int, ArgumentRecord]]:
    if not all(np.all(np.isfinite(kept.values)) for kept in (whole, *parts.values())):
        return
    arrays = {rank: kept.values for rank, kept in parts.items()}
    right, placements = fitting_ranks(whole.values, arrays, mesh)
    for rank in sorted(arrays.keys() - right):
        regions = dict(placements_of(whole.values.shape, arrays[rank].shape, mesh, rank))
        region = regions.get(placements) if placements is not None else next(iter(regions.values()), None)
        if region is not None:
            record = _record(argument, arrays[rank], part_of(whole.values, region), parts[rank].dtype)
            yield rank, structs.replace(record, is_shifted=_is_shifted(arrays[rank], whole.values, region, record))


def fitting_ranks(
    whole: NDArray[np.float64], parts: Mapping[int, NDArray[np.float64]], mesh: Mesh
) -> tuple[Set[int], Placements | None]:
    """Return the ranks that have their part under the placements that most ranks' parts fit, with these placements.

    Args:
        whole: The whole tensor.
        parts: What each rank has.
        mesh: The mesh.
    """
    fitting: defaultdict[Placements, set[int]] = defaultdict(set)
    for rank, part in parts.items():
        for placements, region in placements_of(whole.shape, part.shape, mesh, rank):
            if np.array_equal(part, part_of(whole, region)):
                fitting[placements].add(rank)
    if not fitting:
        return frozenset(), None
    best = max(fitting, key=lambda placements: (len(fitting[placements]), -num_splits(placements)))
    return fitting[best], best


def _record(argument: Argument, held: NDArray[np.float64], expected: NDArray[np.float64], dtype: str) -> ArgumentRecord:
    module, call, name = argument
    off = held - expected
    places = np.argwhere(off != 0)
    if not held.ndim:
        return ArgumentRecord(module, call, name, (), float(held), float(expected), 1, 1, dtype=dtype)
    at = tuple(int(index) for index in places[0])
    numbers = float(held[at]), float(expected[at])
    return ArgumentRecord(module, call, name, at, *numbers, len(places), held.size, dtype=dtype)


def _is_shifted(held: NDArray[np.float64], whole: NDArray[np.float64], region: Region, record: ArgumentRecord) -> bool:
    """Whether each row lacks what the ranks before have counted: the last number before its part, or one more."""
    if record.dtype == "bool" or not held.ndim or len(region.dims[-1]) != 1 or len(np.unique(held)) < LEAST_COUNTED:
        return False
    *dims, ((start, _),) = region.dims
    if not start:
        return False
    last = part_of(whole, Region((*dims, ((start - 1, start),))))
    lacking = part_of(whole, region) - held
    return any(np.array_equal(lacking, np.broadcast_to(last + more, held.shape)) for more in (0, 1))


def arguments_of(dump: Dump, module: str) -> dict[str, dict[int, ArgumentRecord]]:
    """Return what is wrong with arguments of a module's first call, on each rank, by name."""
    arguments: dict[str, dict[int, ArgumentRecord]] = {}
    for rank, of_rank in dump.files.ranks.items():
        for record in of_rank.arguments:
            if (record.module, record.call) == (module, 0):
                arguments.setdefault(record.name, {})[rank] = record
    return arguments


def wrong_argument(dump: Dump, module: str, name: str) -> WrongArgument:
    """Return the cause that a module's wrong argument is, at the outermost module that is given it."""
    arguments, outermost = arguments_of(dump, module)[name], module
    sides = _sides(arguments)
    for outer in enclosing(module):
        same = [own for own, of_outer in arguments_of(dump, outer).items() if _sides(of_outer) == sides]
        if same:
            outermost, name = outer, name if name in same else same[0]
    called = {point.module for record in dump.files.ranks.values() for point in record.trace}
    maker = next((outer for outer in enclosing(outermost) if outer in called), "")
    is_shifted = all(record.is_shifted for record in arguments.values())
    rank, record = min(arguments.items())
    return WrongArgument(outermost, name, maker, f"on rank {rank}, {record.differs}", is_shifted)


def _sides(records: Mapping[int, ArgumentRecord]) -> dict[int, tuple[object, ...]]:
    return {rank: (one.at, one.held, one.expected, one.count, one.size) for rank, one in records.items()}
