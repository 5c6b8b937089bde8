"""The rows that two jobs' models are given, compared: in any order, on any rank, with any padding.

If no row is compared, ranks that share the features of a layer must still be given the same ones. What they return says
which axis splits features: a linear layer whose weight is split over the axis returns a part of them. Under FSDP, which
splits the same weights, it returns all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.jobs.changed_inputs import normalized_rows
from shardviz.check.step.jobs.line_values import column_orders, in_column_order, in_row_order
from shardviz.check.step.jobs.starts import Weights, split_of
from shardviz.check.step.trace.calls import with_first_module
from shardviz.check.step.trace.traces import Kept, OfRank, Point, counts_per_forward, joined_along, largest_of
from shardviz.dump.records.trace import Place, What
from shardviz.explain.step.batches import DifferentBatch, DrawnAlike, RowsPairedOtherwise, SharedRows, WholeBatchPerRank
from shardviz.explain.step.whole_step import RowsOfPeers
from shardviz.groups import the_only
from shardviz.layout.mesh import Mesh, ranks_by
from shardviz.layout.splits import axes_in
from shardviz.relate.orders import places_of
from shardviz.text import join_numbers, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.whole_job import WholeJob
    from shardviz.explain.cause import Cause

MOST_SHARES = 4
"""Ranks whose rows are listed."""

EQUAL_ROWS = "some of the other job's rows are equal, so which of them a rank was given is not known"


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of the first job's batch the ranks of the second were given.

    Attributes:
        order: The first job's rows in the order in which ranks have them; None if that is their own.
        columns: The tokens of its sequences in that order; None if that is their own.
        problem: In what the batches differ, in a sentence; empty if they do not.
        not_joined: How ranks share the batch, if that is right and their parts cannot be put together; else empty.
        num_shares: Among how many ranks with different rows, or columns, the order is divided.
        cause: Why they differ.
    """

    order: NDArray[np.int64] | None = None
    problem: str = ""
    not_joined: str = ""
    num_shares: int = 1
    cause: Cause = field(default_factory=lambda: DifferentBatch(of_jobs=True))
    columns: NDArray[np.int64] | None = None

    def as_ranks_have(self, point: Point, parts: Sequence[Kept | None]) -> Point:
        """Return what one process has at a place in the order of what ranks have there."""
        values = point.values
        if values is not None and self.order is not None:
            values = in_row_order(values, point.dim, parts, self.order)
        if values is not None and self.columns is not None:
            values = in_column_order(values, parts, self.columns)
        return replace(point, values=values)


def rows_of_jobs(reference: WholeJob, job: WholeJob) -> Rows:
    """Return how a job's ranks share the other's rows, by the first assembly that fits."""
    ranks = with_first_module(reference.first_module, job.ranks)
    batches = {rank: own.batch for rank, own in ranks.items() if own.batch}
    rows_by_way = [rows_of(given, batches, job.mesh) for given in reference.batches()]
    unpadded = rows_without_padding(reference.ranks[0], ranks, job.mesh) if reference.is_of_one else None
    if not rows_by_way and reference.is_of_one:
        return unpadded or _order_of_inputs(reference, job)
    rows = next((rows for rows in rows_by_way if not rows.problem), next(iter(rows_by_way), Rows()))
    return unpadded if rows.problem and unpadded is not None else rows


def _order_of_inputs(reference: WholeJob, job: WholeJob) -> Rows:
    """Return in which order ranks have one process's rows, by what its first module is given: nothing calls the model.

    What is given to it is perhaps not the batch, so that other rows are no difference.
    """
    place = Place(reference.first_module, 0, "input", 0)
    points = [
        each.points(counts_per_forward(reference.counts)) for each in (*reference.ranks.values(), *job.ranks.values())
    ]
    given = [each[place].values if place in each else None for each in points]
    whole, parts = given[0], dict(zip(job.ranks, given[1:], strict=True))
    known = {rank: [part] for rank, part in parts.items() if part is not None}
    rows = (
        rows_of([whole], known, job.mesh) if whole is not None and whole.shape and len(known) == len(parts) else Rows()
    )
    return Rows(rows.order, num_shares=rows.num_shares, columns=rows.columns)


def rows_of(whole_batch: list[Kept], batches: Mapping[int, list[Kept]], mesh: Mesh) -> Rows:
    """Compare what both models are given: each rank a split of it, or rows of it in any order.

    Of the inputs that ranks have fewer rows of, the one with the longest rows is the batch. The state of an LSTM has
    them along another dim.
    """
    inputs = list(zip(whole_batch, *batches.values(), strict=False)) if batches else []
    if not inputs or _are_split(whole_batch, batches, mesh):
        return Rows()
    if (shared := _shared_columns(whole_batch, batches, mesh)) is not None:
        return shared
    of_rows = [each for each in inputs if _are_of_rows(*each)] or inputs[:1]
    whole, *of_ranks = max(of_rows, key=lambda each: math.prod(each[0].shape[1:]))
    given = dict(zip(batches, of_ranks, strict=True))
    rows = _rows_of_ranks(whole, given)
    unknown = [rank for rank, known in rows.items() if known is None]
    size = next(iter(whole.shape), 0)
    others = [tensors for tensors in inputs if tensors[0] is not whole]
    if unknown:
        return _drawn_alike(others) or _of_unknown(unknown, whole, given)
    shares = {rank: tuple(known.tolist()) for rank, known in rows.items() if known is not None}
    parts = list(dict.fromkeys(shares.values()))
    every = [row for part in parts for row in part]
    num_different = len(np.unique(whole.values, axis=0)) if whole.values.size else 0
    if len(set(every)) < size:
        given_rows = whole.values[sorted(set(every))]
        are_all_there = num_different < size and len(np.unique(given_rows, axis=0)) == num_different
        if are_all_there:
            return Rows(not_joined=EQUAL_ROWS)
        of_same_rows = [tensors for tensors in of_rows if tensors[0] is not whole]
        return _paired_with_all(shares, of_same_rows) or _incomplete(shares, size, mesh)
    if len(every) > size:
        again = {row for row, count in Counter(every).items() if count > 1}
        text = (
            f"rows {join_numbers(again)} of the other job's {size} were given to several ranks: {shares_text(shares)}"
        )
        return Rows(problem=text)
    is_order_unknown = len(whole.shape) == 1 or not all(_are_in_order(shares, *tensors) for tensors in others)
    if num_different < size and every != list(range(size)) and is_order_unknown:
        return Rows(not_joined=EQUAL_ROWS)
    if (paired := _paired_otherwise(shares, others)) is not None:
        return paired
    if len({len(part) for part in parts}) > 1:
        return Rows(
            not_joined=f"ranks were given unequal numbers of the other job's {size} rows: {shares_text(shares)}"
        )
    return Rows(np.array(every, np.int64), num_shares=len(parts))


def _drawn_alike(others: Sequence[Sequence[Kept]]) -> Rows | None:
    """Return that all ranks have the first rows of another input, which are drawn anew in each step; or None.

    The rows of what it is combined with, as images with noise, are then no rows of the other job's. Positions and where
    packed rows begin are the same on all ranks, too, but they rise or repeat.
    """
    for whole, *parts in others:
        first, size = parts[0].values, next(iter(parts[0].shape), 0)
        is_part = 0 < size < next(iter(whole.shape), 0) and len(np.unique(whole.values, axis=0)) > 1
        are_alike = len(parts) > 1 and all(np.array_equal(part.values, first) for part in parts)
        if is_part and are_alike and np.array_equal(whole.values[:size], first) and not _are_counted(whole, size):
            shapes = f"{list(parts[0].shape)} and {list(whole.shape)}"
            text = (
                f"all ranks were given the same {size} rows of one input, the first that the other job drew, and other "
                f"rows of the rest (shapes {shapes})"
            )
            return Rows(problem=text, cause=DrawnAlike(size))
    return None


def _are_counted(whole: Kept, size: int) -> bool:
    """Whether no row is smaller than the one before it, or all rows are among the first so many."""
    rows = whole.values.reshape(len(whole.values), -1)
    steps = np.diff(rows, axis=0)
    first_steps = np.take_along_axis(steps, (steps != 0).argmax(1)[:, None], 1)
    return bool((first_steps >= 0).all()) or len(np.unique(rows, axis=0)) == len(np.unique(rows[:size], axis=0))


def _of_unknown(unknown: Sequence[int], whole: Kept, given: Mapping[int, Kept]) -> Rows:
    """Return why some ranks have rows that the whole batch doesn't have."""
    rank, parts = unknown[0], list(given.values())
    if _are_padded_parts(whole, parts):
        shapes = f"{list(given[rank].shape)} of the other job's {list(whole.shape)}"
        return Rows(not_joined=f"rank {rank} was given {shapes}, and the last ranks' parts are padded")
    if _are_cut_alone(whole, parts):
        lengths = f"{given[rank].shape[1]} of {whole.shape[1]}"
        sentence = f"rank {rank} was given the other job's rows padded or cut to a length of its own"
        return Rows(not_joined=f"{sentence}, {lengths}")
    if (normalized := normalized_rows(whole, given)) is not None:
        return Rows(problem=normalized[0], cause=normalized[1])
    shapes = f"{list(given[rank].shape)} and {list(whole.shape)}"
    text = f"rank {rank} was given rows that the other job's batch doesn't have (shapes {shapes})"
    are_whole = all(part.shape == whole.shape for part in parts) and len(unknown) < len(given)
    complete = [other for other in given if other not in unknown]
    has = "has" if len(complete) == 1 else "have"
    clause = f"; {named_ranks(complete)} {has} all rows of that batch" if are_whole else ""
    return Rows(problem=f"{text}{clause}", cause=WholeBatchPerRank() if are_whole else DifferentBatch(of_jobs=True))


def _shared_columns(whole_batch: list[Kept], batches: Mapping[int, list[Kept]], mesh: Mesh) -> Rows | None:
    """Return how ranks share the tokens of the first input, in whatever order; None if each has all of a row's.

    The other inputs, such as positions, are those of the same tokens, or the first wrong module is given them.
    """
    whole, *parts = next(zip(whole_batch, *batches.values(), strict=False))
    if len(whole.shape) < 2 or not any(part.shape[1:2] < whole.shape[1:2] for part in parts):
        return None
    given = {rank: [part] for rank, part in zip(batches, parts, strict=True)}
    if _are_split([whole], given, mesh):
        return Rows()
    for columns, num_shares in column_orders(whole.shape[1], mesh):
        if _are_split([in_column_order(whole, parts, columns)], given, mesh):
            return Rows(columns=columns, num_shares=num_shares)
    return None


def _paired_otherwise(shares: Mapping[int, tuple[int, ...]], others: Sequence[Sequence[Kept]]) -> Rows | None:
    """Return that a rank's rows of another input aren't those that belong to its rows of the longest one."""
    for whole, *parts in others:
        if _are_in_order(shares, whole, *parts) or len(np.unique(whole.values, axis=0)) < len(whole.values):
            continue
        rows = _rows_of_ranks(whole, dict(zip(shares, parts, strict=True)))
        known = {rank: tuple(at.tolist()) for rank, at in rows.items() if at is not None}
        rank = next((rank for rank, share in shares.items() if known.get(rank, share) != share), None)
        if len(known) == len(shares) and rank is not None:
            return _pair_apart(rank, shares[rank], known[rank])
    return None


def _paired_with_all(shares: Mapping[int, tuple[int, ...]], others: Sequence[Sequence[Kept]]) -> Rows | None:
    """Return that ranks have all rows of another input, and of the longest one the same rows several times."""
    for whole, *parts in others:
        rows = _rows_of_ranks(whole, dict(zip(shares, parts, strict=True)))
        known = {rank: tuple(at.tolist()) for rank, at in rows.items() if at is not None}
        is_all = len(known) == len(shares) and {row for share in known.values() for row in share} == {
            *range(whole.shape[0])
        }
        rank = next((rank for rank, share in shares.items() if is_all and known[rank] != share), None)
        if rank is not None:
            return _pair_apart(rank, known[rank], shares[rank])
    return None


def _pair_apart(rank: int, rows: Sequence[int], others: Sequence[int]) -> Rows:
    text = (
        f"rank {rank} was given rows {join_numbers(rows)} of one input and rows {join_numbers(others)} of the other, "
        "numbered as the other job has them"
    )
    return Rows(problem=text, cause=RowsPairedOtherwise())


def _are_in_order(shares: Mapping[int, tuple[int, ...]], whole: Kept, *parts: Kept) -> bool:
    """Whether ranks' parts of another input are its rows at the places of their shares; also if it has no rows."""
    pairs = list(zip(parts, shares.values(), strict=True))
    if any(
        part.shape != (len(share), *whole.shape[1:]) or max(share, default=-1) >= whole.shape[0]
        for part, share in pairs
    ):
        return True
    near = max(_near(whole, part) for part in parts) * (largest_of(whole) or 1.0)
    return all(np.all(np.abs(whole.values[list(share)] - part.values) <= near) for part, share in pairs)


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


def shares_text(rows: Mapping[int, tuple[int, ...]]) -> str:
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
        f"its ranks were given {len(given)} of the other job's {size} rows: {shares_text(rows)}; no rank was "
        f"given rows {join_numbers(set(range(size)) - given)}"
    )
    are_slices = all(np.all(np.diff(rows_of_rank) == 1) for rows_of_rank in ranks_of)
    is_shared = bool(axes) or (are_slices and sum(map(len, ranks_of)) > len(given))
    return Rows(problem=sentence, cause=SharedRows(axes)) if is_shared else Rows(problem=sentence)


def _are_split(whole_batch: list[Kept], batches: Mapping[int, list[Kept]], mesh: Mesh) -> bool:
    """Whether a split of each tensor over the mesh gives all ranks what they were given."""
    return all(len(batch) == len(whole_batch) for batch in batches.values()) and all(
        split_of(whole, {rank: batch[index] for rank, batch in batches.items()}, mesh, _near) is not None
        for index, whole in enumerate(whole_batch)
    )


def _near(whole: Kept, part: Kept) -> float:
    return max(whole.tolerance, part.tolerance)


def _rows_of_ranks(whole: Kept, given: Mapping[int, Kept]) -> dict[int, NDArray[np.int64] | None]:
    """Return the rows of the whole batch that each rank was given: of equal ones others than ranks with other rows."""
    taken: set[int] = set()
    by_content: dict[bytes, NDArray[np.int64] | None] = {}
    for rows in given.values():
        content = rows.values.tobytes()
        if content not in by_content:
            by_content[content] = at = _rows(whole, rows, taken)
            taken.update(at.tolist() if at is not None else ())
    return {rank: by_content[rows.values.tobytes()] for rank, rows in given.items()}


def _rows(whole: Kept, rows: Kept, taken: Collection[int] = ()) -> NDArray[np.int64] | None:
    """Return the rows of the whole batch that a rank was given, rather none that is taken; None if one isn't in it."""
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
        at.append(min(free, key=lambda index: (index in taken, index)))
        used.add(at[-1])
    return np.array(at, np.int64)


def rows_without_padding(whole: OfRank, ranks: Mapping[int, OfRank], mesh: Mesh) -> Rows | None:
    """Return which rows of a job of one process ranks were given, if some were padded to lengths of their own.

    Returns:
        None if all were padded to one length, or cut into parts of one length.
    """
    whole_calls, calls = whole.calls_of_batch, {rank: of_rank.calls_of_batch for rank, of_rank in ranks.items()}
    uneven: set[int] = set()
    for key in (key for key in whole_calls if calls and all(key in of_rank for of_rank in calls.values())):
        wanted, given = whole_calls[key], {rank: of_rank[key] for rank, of_rank in calls.items()}
        tensors = [*wanted, *(tensor for of_rank in given.values() for tensor in of_rank)]
        if not all(tensor.is_whole and len(tensor.shape) == 2 for tensor in tensors):
            continue
        longest = max(tensor.shape[1] for tensor in tensors)
        lengths = {tensor.shape[1] for of_rank in given.values() for tensor in of_rank}
        if len(lengths) == 1 and longest % min(lengths) == 0:
            continue
        uneven |= lengths
        padding = _padding_of(tensors)
        if padding is None:
            continue
        every = _filled_up(wanted, longest, padding)
        if every is None or len(np.unique(every.values, axis=0)) < len(every.values):
            continue
        of_ranks = {rank: _filled_up(own, longest, padding) for rank, own in given.items()}
        rows = rows_of([every], {rank: [own] for rank, own in of_ranks.items() if own is not None}, mesh)
        return rows if rows.problem else Rows(not_joined=_padded_text(uneven))
    return Rows(not_joined=_padded_text(uneven)) if uneven else None


def _padded_text(lengths: set[int]) -> str:
    return f"ranks were given rows padded to lengths of their own: {join_numbers(lengths)}"


def _padding_of(tensors: Sequence[Kept]) -> float | None:
    """Return the number that rows are filled up with: the only one that stands at the end of rows and nowhere else."""
    ends = {float(number) for tensor in tensors for number in tensor.values[:, -1]}
    return the_only({number for number in ends if all(_only_ends(tensor, number) for tensor in tensors)})


def _only_ends(tensor: Kept, number: float) -> bool:
    is_number = tensor.values == number
    return not np.any(is_number[:, :-1] & ~is_number[:, 1:])


def _filled_up(calls: list[Kept], length: int, padding: float) -> Kept | None:
    """Return all rows of a tensor, filled up to a length."""
    filled = []
    for tensor in calls:
        count, own_length = tensor.shape
        values = np.pad(tensor.values, ((0, 0), (0, length - own_length)), constant_values=padding)
        filled.append(replace(tensor, shape=(count, length), at=(tensor.at[0], np.arange(length)), values=values))
    return joined_along(0, filled)


SIDES: tuple[What, What] = ("input", "output")


def rows_of_peers(reference: WholeJob, job: WholeJob, weights: Weights) -> RowsOfPeers | None:
    """Return the cause if ranks along an axis that splits features were given different rows of one shape."""
    batches = {rank: own.batch[0] for rank, own in job.ranks.items() if own.batch}
    given = next(iter(reference.batches()), [])
    shapes = [*{batch.shape: None for batch in batches.values()}]
    is_of_rows = given and len(shapes) == 1 and shapes[0] and given[0].shape[1:] == shapes[0][1:]
    if not (reference.is_of_one and is_of_rows and shapes[0][0]):
        return None
    layers = list(_linears(reference, job, weights, given[0].shape[0] / shapes[0][0]))
    sizes = {axis: job.mesh.axis_size(axis) for axis in job.mesh.axes}
    alone = {(axis, factor) for _, axes, factor in layers if len(axes) == 1 for axis in axes}
    of_data = {axis for axis, size in sizes.items() if (axis, 1) in alone and (axis, size) not in alone}
    for module, axes, factor in layers:
        for axis in axes - of_data if len(axes - of_data) == 1 else ():
            if factor == sizes[axis] and _differ_along(axis, batches, job.mesh):
                return RowsOfPeers(module, axis, is_only_axis=max(sizes.values()) == job.mesh.size)
    return None


def _linears(
    reference: WholeJob, job: WholeJob, weights: Weights, shares: float
) -> Iterator[tuple[str, frozenset[str], int]]:
    """Yield the layers whose weights are split along their first dim, which counts the features that they return.

    With each come the axes that split its weight, and how many times fewer features ranks return; 0 if they also have
    other rows than they were given.
    """
    counts, first = counts_per_forward(reference.counts), min(job.ranks)
    whole, of_rank = (each.ranks[min(each.ranks)].points(counts) for each in (reference, job))
    for name in (name for name in weights.parts if name.endswith(".weight") and first in weights.parts[name]):
        module, belonging = name.removesuffix(".weight"), weights.belongings.get(name)
        layout = weights.parts[name][first].layout or (belonging.layout if belonging is not None else None)
        given, returned, own_given, own_returned = (
            _shape(points, Place(module, 0, what, 0)) for points in (whole, of_rank) for what in SIDES
        )
        if layout is None or not (
            layout.shape and given and returned and own_given and own_returned and own_returned[-1]
        ):
            continue
        axes = frozenset({*axes_in(layout.chains[0])} & {*job.mesh.long_axes})
        if axes and layout.shape[0] == returned[-1]:
            is_of_all_rows = math.prod(given[:-1]) == math.prod(own_given[:-1]) * shares  # a sequence's, too
            yield module, axes, returned[-1] // own_returned[-1] if is_of_all_rows else 0


def _shape(points: Mapping[Place, Point], place: Place) -> tuple[int, ...]:
    values = points[place].values if place in points else None
    return () if values is None else values.shape


def _differ_along(axis: str, batches: Mapping[int, Kept], mesh: Mesh) -> bool:
    """Whether no group of ranks along an axis was given the same rows."""
    groups = [[batches[rank].values for rank in group if rank in batches] for group in mesh.groups(axis)]
    return all(len(group) > 1 and not all(np.array_equal(group[0], rows) for rows in group[1:]) for group in groups)
