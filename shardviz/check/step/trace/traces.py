"""What the ranks of a job wrote of one step, by place; micro-batches are put together.

Of a tensor a trace kept all elements, or a sample along some dims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from shardviz.check.step.trace.calls import is_within
from shardviz.dump.arrays import kept_indices, strides_between
from shardviz.dump.dump import Dump, Shard, dump_of
from shardviz.dump.read import arrays_of, read_files
from shardviz.dump.records.trace import KeptRecord, Place, of_point
from shardviz.dump.write import TRACE_FOLDER
from shardviz.groups import in_groups, the_only
from shardviz.relate.tolerance import ELEMENT, EXACT, TENSOR_FLOAT
from shardviz.relate.values import finite_magnitude

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.dump.records.base import Moment
    from shardviz.dump.records.files import RankRecord
    from shardviz.dump.records.tensors import Body
    from shardviz.dump.records.trace import Again
    from shardviz.layout.layout import Layout
    from shardviz.layout.region import Ranges, Region


@dataclass(frozen=True)
class Kept:
    """Elements of a tensor.

    Attributes:
        at: The indices that are kept along each dim, rising.
        values: The elements at all of them.
        device: Where it was.
        is_stepped: Whether it is a weight that optimizer steps before the traced one have rounded.
    """

    shape: tuple[int, ...]
    at: tuple[NDArray[np.int64], ...]
    values: NDArray[np.float64]
    dtype: str
    device: str = "cpu"
    is_stepped: bool = False

    @staticmethod
    def of(shape: tuple[int, ...], values: NDArray[np.float64], dtype: str, device: str = "cpu") -> Kept | None:
        """Return the elements that a sample of a tensor has; None if its shape is not a sample's."""
        strides = strides_between(shape, values.shape)
        if strides is None:
            return None
        at = (np.array(kept_indices(size, stride), np.int64) for size, stride in zip(shape, strides, strict=True))
        return Kept(shape, tuple(at), values, dtype, device)

    @staticmethod
    def whole(values: NDArray[np.float64]) -> Kept:
        """Return a tensor of which all elements are there."""
        return Kept(values.shape, tuple(map(np.arange, values.shape)), values, "float64")

    @property
    def tolerance(self) -> float:
        """How far rounding may take an element that is computed, relative to the largest one."""
        return ELEMENT.get(rounded_to(self.dtype, self.device), EXACT)

    @property
    def is_whole(self) -> bool:
        """Whether all elements are there."""
        return self.values.size == math.prod(self.shape)

    def with_values(self, values: NDArray[np.float64]) -> Kept:
        """Return the same elements with other values."""
        return replace(self, values=values)

    def reordered(self, order: NDArray[np.int64], dim: int = 0) -> Kept:
        """Return the tensor with its rows, along a dim, in another order: row `order[i]` becomes row `i`."""
        inverse = np.argsort(order)
        at = inverse[self.at[dim]]
        by = np.argsort(at)
        ats = (*self.at[:dim], at[by], *self.at[dim + 1 :])
        return replace(self, at=ats, values=self.values.take(by, dim))


def rounded_to(dtype: str, device: str) -> str:
    """Return the dtype that numbers count as that were computed on a device: a GPU may multiply float32 in TF32."""
    return TENSOR_FLOAT if dtype == "float32" and not device.startswith("cpu") else dtype


def joined(parts: Sequence[Kept | None], dim: int = 0) -> Kept | None:
    """Concatenate micro-batches; return None if one is missing or they don't fit."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len(parts) < 2:
        return present[0] if present and len(parts) == 1 else None
    return joined_along(dim, present)


def joined_along(dim: int, parts: Sequence[Kept]) -> Kept | None:
    """Return parts as one tensor, one behind the other along a dim; None if they do not fit."""
    first = parts[0]
    if len(first.shape) <= dim or not all(_fits(dim, first, part) for part in parts):
        return None
    starts = np.cumsum([0, *(part.shape[dim] for part in parts)])
    at = np.concatenate([part.at[dim] + start for part, start in zip(parts, starts[:-1], strict=True)])
    values = np.concatenate([part.values for part in parts], dim)
    shape = *first.shape[:dim], int(starts[-1]), *first.shape[dim + 1 :]
    return replace(first, shape=shape, at=(*first.at[:dim], at, *first.at[dim + 1 :]), values=values)


def _fits(dim: int, first: Kept, second: Kept) -> bool:
    """Whether two parts have the same elements along all dims but one."""
    return len(first.at) == len(second.at) and all(
        at == dim or (first.shape[at] == second.shape[at] and np.array_equal(first.at[at], second.at[at]))
        for at in range(len(first.at))
    )


def in_both(whole: Kept, shard: Kept, region: Region) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the elements kept of both a tensor and its part, the whole's first.

    Returns:
        Two arrays of one shape; None if no element is kept of both.
    """
    if whole.is_whole and shard.is_whole and all(len(spans) == 1 for spans in region.dims):
        return whole.values[tuple(slice(*spans[0]) for spans in region.dims)], shard.values
    whole_dims, shard_dims = [], []
    for spans, at, others in zip(region.dims, shard.at, whole.at, strict=True):
        indices = _in_whole(spans, at)
        places = np.minimum(np.searchsorted(others, indices), max(len(others) - 1, 0))
        is_there = others[places] == indices if len(others) else np.zeros(len(indices), bool)
        whole_dims.append(places[is_there])
        shard_dims.append(np.flatnonzero(is_there))
    if any(not len(one) for one in whole_dims):
        return None
    return whole.values[np.ix_(*whole_dims)], shard.values[np.ix_(*shard_dims)]


def places_in_whole(part: Kept, region: Region) -> tuple[NDArray[np.int64], ...]:
    """Return where in a tensor the elements are that are kept of a part of it, along each dim."""
    return tuple(_in_whole(spans, at) for spans, at in zip(region.dims, part.at, strict=True))


def _in_whole(spans: Ranges, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where indices of a part stand in the whole, of whose dim it has some ranges."""
    ends = np.cumsum([stop - start for start, stop in spans])
    which = np.searchsorted(ends, at, side="right")
    starts = np.array([start for start, _ in spans], np.int64)
    before = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    places: NDArray[np.int64] = starts[which] + at - before[which]
    return places


@dataclass(frozen=True)
class Point:
    """What a rank has at a place.

    Attributes:
        values: What was kept; None for a gradient that did not come, or if too much was kept before it.
        needs_grad: Whether a gradient can flow back to the tensor.
        tensor: A number that points of one tensor share.
        order: When the call ended.
        type: The module's class.
        draws: Whether the call drew random numbers.
        dim: The dim along which the batch's rows are.
        is_overwritten: Whether something wrote into the tensor between forward and backward.
        is_without_graph: Whether gradients were switched off in the call.
        again: What differed as backward ran the call again.
        lengths: How long each micro-batch is along that dim, if they are joined.
    """

    values: Kept | None
    needs_grad: bool
    tensor: int
    order: int
    type: str
    draws: bool = False
    dim: int = 0
    is_overwritten: bool = False
    is_without_graph: bool = False
    again: Again = ""
    lengths: tuple[int, ...] = ()

    def split(self) -> list[NDArray[np.float64]]:
        """Return the rows of each micro-batch; none if they are not known."""
        if self.values is None or not self.lengths:
            return []
        return np.split(self.values.values, np.cumsum(self.lengths)[:-1], axis=self.dim)


@dataclass(frozen=True)
class Weight:
    """A rank's part of a weight, or of its gradient.

    Attributes:
        shape: The whole weight's shape, as the rank sees it.
        layout: What its placements claim; None for a plain tensor.
        values: What was kept of the part; None if its shape is not understood.
    """

    shape: tuple[int, ...]
    layout: Layout | None
    values: Kept | None


@dataclass(frozen=True)
class OfRank:
    """One rank's trace.

    Attributes:
        dump: The whole trace's dump.
    """

    rank: int
    dump: Dump

    @cached_property
    def records(self) -> Sequence[KeptRecord]:
        """What it wrote of places, in order."""
        return self.dump.files.ranks[self.rank].kept

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How often each module was called: the model as often as it was given a batch, if it returns only a number."""
        counts: dict[str, int] = {}
        batches = [record for record in self.records if record.what == "batch"]
        calls = [record for record in self.records if record.what != "batch"]
        for record in calls if any(not record.module for record in calls) else (*calls, *batches):
            counts[record.module] = max(counts.get(record.module, 0), record.call + 1)
        return counts

    @cached_property
    def batch(self) -> list[Kept]:
        """What the model was given, each tensor joined over the calls: whole numbers first.

        If nothing calls the model itself, as in Lightning on one process, it is what the one module in it was given.
        """
        calls = self.calls_of_batch
        tensors = (joined(calls[key]) for key in sorted(calls))
        return [one for one in tensors if one is not None]

    @cached_property
    def calls_of_batch(self) -> dict[tuple[str, int], list[Kept]]:
        """What the model was given in each call, by what it is and its number; nothing that was not kept."""
        outermost: list[str] = []
        for name in () if "" in self.counts else sorted(self.counts, key=lambda name: f"{name}."):
            outermost += [] if outermost and is_within(name, outermost[-1]) else [name]
        model = the_only(outermost) or ""
        records = [one for one in self.records if one.what == "batch" or (one.module, one.what) == (model, "input")]
        by_tensor = in_groups(((record.what, record.index), record) for record in records)
        calls = {key: [self.activation(_name(one)) for one in own] for key, own in by_tensor.items()}
        return {
            key: kept for key, own in calls.items() if len(kept := [one for one in own if one is not None]) == len(own)
        }

    def points(
        self, counts: Mapping[str, int], dim: int = 0, rows: Mapping[Place, frozenset[int]] = MappingProxyType({})
    ) -> dict[Place, Point]:
        """Return the rank's points at every place, its micro-batches joined.

        What is the same in all micro-batches, and as long as what the other side has in one, is no part of the batch,
        as embedded positions are not: it is there once, and its gradients add up.

        Args:
            counts: How often each module is called in one forward.
            dim: The dim of the batch.
            rows: What `rows` of this dim returns on the other side.
        """
        by_place = self._by_place(counts)
        values = {place: [self.activation(_name(record)) for record in records] for place, records in by_place.items()}
        dims = {place: self._dim_of_rows(parts[0].shape if parts[0] else (), dim) for place, parts in values.items()}
        once = {place for place, parts in values.items() if _are_alike(parts, dims[place], rows.get(place, ()))}
        points: dict[Place, Point] = {}
        for place, records in by_place.items():
            parts, forward = values[place], place.forward if place.is_gradient else place
            if forward in once:
                points[place] = _point(records, added(parts) if place.is_gradient else parts[0], dims[place])
            else:
                dim = dims[place]
                lengths = tuple(part.shape[dim] for part in parts if part is not None and len(part.shape) > dim)
                point = _point(records, joined(parts, dim), dim)
                points[place] = replace(point, lengths=lengths) if len(lengths) == len(parts) else point
        return points

    @cached_property
    def _given(self) -> set[tuple[int, ...]]:
        """The shapes of tokens: the model's whole numbers in rows of one length."""
        shards = [self._shard(_name(record)) for record in self.records if record.what == "batch"]
        return {shard.body.shape for shard in shards if shard is not None and len(shard.body.shape) == 2}

    def _dim_of_rows(self, shape: tuple[int, ...], dim: int) -> int:
        """Return the dim of an activation along which the batch's rows are: some models put the sequence first."""
        is_second = len(shape) > 2 and any(
            shape[0] != rows and shape[1] == rows and length % shape[0] == 0 for rows, length in self._given if shape[0]
        )
        return 1 if is_second else dim

    def rows(self, counts: Mapping[str, int], dim: int = 0) -> dict[Place, frozenset[int]]:
        """Return how long a dim is at every place in forward, in any of its calls."""
        rows: dict[Place, frozenset[int]] = {}
        for place, records in self._by_place(counts).items():
            shards = [] if place.is_gradient else [self._shard(_name(record)) for record in records]
            shapes = {shard.body.shape for shard in shards if shard is not None}
            dims = {shape: self._dim_of_rows(shape, dim) for shape in shapes}
            rows[place] = frozenset(shape[dims[shape]] for shape in shapes if len(shape) > dims[shape])
        return rows

    def _by_place(self, counts: Mapping[str, int]) -> dict[Place, list[KeptRecord]]:
        by_place: dict[Place, list[KeptRecord]] = {}
        for record in self.records:
            count = counts.get(record.module, 0)
            if record.what == "batch" or record.what == "argument":
                continue
            if count and not self.counts[record.module] % count:
                place = Place(record.module, record.call % count, record.what, record.index)
                by_place.setdefault(place, []).append(record)
        return by_place

    def _shard(self, name: str) -> Shard | None:
        tensor = self.dump.find("step", "activation", name)
        return tensor.shards.get(self.rank) if tensor is not None else None

    def activation(self, name: str) -> Kept | None:
        """Return what it has under a name; None if it has nothing."""
        shard = self._shard(name)
        if shard is None:
            return None
        return Kept.of(shard.body.shape, self._numbers(shard, name), shard.body.dtype, shard.body.device)

    @cached_property
    def _arrays(self) -> Mapping[str, NDArray[np.generic]]:
        return arrays_of(self.dump.files, self.rank)

    def _numbers(self, shard: Shard, name: str) -> NDArray[np.float64]:
        body = shard.body
        if not body.dense and not _is_complex(body):
            return self.dump.values(shard, name)
        raw = self._arrays[f"{body.moment}/{body.role}/{name}"] if body.dense else body.values
        values = np.asarray(raw)
        return np.asarray(np.stack([values.real, values.imag], -1) if np.iscomplexobj(values) else values, np.float64)

    def weights(self, role: str, moment: Moment = "step") -> Iterator[tuple[str, Weight]]:
        """Yield its parts of the weights before the step, "updated" ones, or gradients, by name."""
        for name, tensor in self.dump.by_name(moment, role).items():
            shard = tensor.shards.get(self.rank)
            if shard is not None:
                yield name, self._weight(name, shard)

    def _weight(self, name: str, shard: Shard) -> Weight:
        layout, body = shard.layout, shard.body
        if layout is None and (0 in body.local_shape or len(body.local_shape) != len(body.shape)):
            return Weight(body.shape, None, None)  # a stretch of a flat parameter, which may be empty here
        if layout is not None and _is_complex(body):
            return Weight(body.shape, layout, None)
        shape = body.local_shape if layout is None else layout.region_of_rank(self.rank).shape
        shape = (*shape, 2) if _is_complex(body) else shape
        kept = Kept.of(shape, self._numbers(shard, name), body.dtype, body.device)
        is_stepped = self.dump.files.ranks[self.rank].steps_before > 0
        whole = (*body.shape, 2) if _is_complex(body) else body.shape
        return Weight(whole, layout, None if kept is None else replace(kept, is_stepped=is_stepped))


def _is_complex(body: Body) -> bool:
    """Whether a tensor has complex numbers: without a layout, they are compared as pairs."""
    return body.dtype.startswith("complex")


def _name(record: KeptRecord) -> str:
    return record.same_as or of_point(record.module, record.what, record.call, record.index)


def _point(records: Sequence[KeptRecord], values: Kept | None, dim: int) -> Point:
    first = records[0]
    draws = any(record.draws for record in records)
    needs_grad = any(record.needs_grad for record in records)
    is_overwritten = any(record.is_overwritten for record in records)
    again: Again = next((record.again for record in records if record.again), "")
    is_without_graph = any(record.is_without_graph for record in records)
    sides = draws, dim, is_overwritten, is_without_graph, again
    return Point(values, needs_grad, first.tensor, first.order, first.type, *sides)


def _are_alike(parts: Sequence[Kept | None], dim: int, rows: Collection[int]) -> bool:
    """Whether several micro-batches have the same, and one of them is as long as one of some lengths."""
    first = parts[0]
    return (
        first is not None
        and len(parts) > 1
        and len(first.shape) > dim
        and first.shape[dim] in rows
        and all(part is not None and np.array_equal(part.values, first.values) for part in parts)
    )


def added(parts: Sequence[Kept | None]) -> Kept | None:
    """Return the sum of parts, as of the gradients of one tensor; None if one is missing or they differ in shape."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts) or len({(part.shape, part.values.shape) for part in present}) > 1:
        return None
    return present[0].with_values(np.sum([part.values for part in present], axis=0))


@dataclass(frozen=True)
class JobTrace:
    """A job's trace of one step.

    Attributes:
        dump: It, as a dump.
        ranks: What each rank wrote.
    """

    dump: Dump
    ranks: Mapping[int, OfRank]

    @property
    def is_of_one(self) -> bool:
        """Whether the job is one process: its values are whole."""
        return self.dump.files.run.num_ranks == 1

    @property
    def records(self) -> Mapping[int, RankRecord]:
        """What each rank's file says of the step as a whole."""
        return self.dump.files.ranks

    def weights(self, role: str, moment: Moment = "step") -> dict[str, dict[int, Weight]]:
        """Return ranks' weights before the step, "updated" ones, or what belongs to them, by name."""
        parts: dict[str, dict[int, Weight]] = {}
        for rank, of_rank in self.ranks.items():
            for name, weight in of_rank.weights(role, moment):
                parts.setdefault(name, {})[rank] = weight
        return parts


def trace_of(dump: Dump) -> JobTrace | None:
    """Return the trace of a step that a job's dump has.

    Raises:
        DumpError: It is damaged.
    """
    folder = dump.files.path / TRACE_FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return None
    tied = {rank: record.tied for rank, record in dump.files.ranks.items()}
    return read_trace(folder, tied)


def read_trace(folder: Path, tied: Mapping[int, tuple[tuple[str, ...], ...]] = MappingProxyType({})) -> JobTrace:
    """Read the trace of a step.

    Args:
        folder: Where ranks wrote it.
        tied: The names that share storage on each rank, which the job's own dump has.

    Raises:
        DumpError: It is damaged.
    """
    files = read_files(folder)
    ranks = {rank: structs.replace(record, tied=tied.get(rank, ())) for rank, record in files.ranks.items()}
    traced = dump_of(replace(files, ranks=ranks) if any(tied.values()) else files)
    return JobTrace(traced, {rank: OfRank(rank, traced) for rank in sorted(traced.files.ranks)})


def joined_rows(of_ranks: Iterable[Mapping[Place, frozenset[int]]]) -> dict[Place, frozenset[int]]:
    """Return the numbers of rows at each place, on any rank."""
    rows: dict[Place, frozenset[int]] = {}
    for of_rank in of_ranks:
        for place, numbers in of_rank.items():
            rows[place] = rows.get(place, frozenset()) | numbers
    return rows


def counts_per_forward(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how often each module is called in one forward of the model, given how often it was called in the step."""
    forwards = max(counts.get("", 1), 1)
    return {name: count // forwards if count % forwards == 0 else count for name, count in counts.items()}


def largest_of(kept: Kept | None) -> float:
    """Return the size of the largest finite element; 0 if nothing was kept."""
    return finite_magnitude(kept.values) if kept is not None else 0.0
