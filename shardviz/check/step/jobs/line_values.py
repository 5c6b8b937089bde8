"""The lines that two jobs recorded, as one dump's: one process's values with their rows as the ranks have them.

A sampler deals rows out one by one, so that a rank's part is no run of one process's rows. Which rows each rank has is
known from what the model was given. Whether a value has them along a dim is not, so it is looked for on the first rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from shardviz.dump.records.trace import STEP, LinesRecord, of_value
from shardviz.groups import in_groups, the_only
from shardviz.relate.tolerance import ELEMENT, EXACT
from shardviz.relate.values import farthest, magnitude

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.jobs.assembly import Assembling
    from shardviz.check.step.jobs.rows import Rows
    from shardviz.check.step.trace.traces import JobTrace, Kept, OfRank

    Reorder = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class OrderInCalls:
    """Which of one process's rows the ranks have in a call of the model, the same in all of its calls.

    Attributes:
        rows: The rows, those of one share behind those of another; None if these are in order.
        num_shares: How many shares there are.
        has_one_loss: Whether the model is called once, or the ranks have a run of rows of all calls together.
    """

    rows: NDArray[np.int64] | None = None
    num_shares: int = 1
    has_one_loss: bool = True

    @staticmethod
    def of(rows: Rows, reference: JobTrace, job: JobTrace) -> OrderInCalls | None:
        """Return which rows ranks have in a call; None if a call has rows of several calls of one process."""
        if rows.order is None and rows.columns is None:
            return OrderInCalls()
        num_calls = the_only({_num_calls(of_rank) for each in (reference, job) for of_rank in each.ranks.values()}) or 0
        if rows.order is None:
            return OrderInCalls(rows.columns, rows.num_shares, num_calls == 1)
        if not num_calls or len(rows.order) % (rows.num_shares * num_calls):
            return None
        calls = rows.order.reshape(rows.num_shares, num_calls, -1).swapaxes(0, 1).reshape(num_calls, -1)
        first, *others = calls - np.arange(num_calls)[:, None] * calls.shape[1]
        in_order = np.arange(len(first))
        if not np.array_equal(np.sort(first), in_order) or not all(np.array_equal(first, other) for other in others):
            return None
        return OrderInCalls(None if np.array_equal(first, in_order) else first, rows.num_shares, not others)


def _num_calls(of_rank: OfRank) -> int:
    return max(map(len, of_rank.calls_of_batch.values()), default=0)


def add_lines(assembling: Assembling, reference: JobTrace, job: JobTrace, order: OrderInCalls) -> None:
    """Add the lines that both jobs recorded, with their values.

    Those around the model are left out if it is called several times, each time with a loss of its own.
    """
    whole = [lines for lines in reference.dump.files.ranks[0].lines if lines.module != STEP or order.has_one_loss]
    modules = {lines.module for lines in whole}
    first = min(job.ranks)
    held: list[Kept] = []
    for rank, record in job.records.items():
        own = [lines for lines in record.lines if lines.module in modules]
        for name, kept in _values_of(job.ranks[rank], own):
            assembling.add(rank, name, ("step", "activation"), kept.shape, kept.values, kept.dtype)
            held += [kept] if rank == first and kept.is_whole else []
        assembling.lines[rank] = tuple(map(_with_inputs, own))
    rows = None
    if order.rows is not None:
        rows = RowsOfLines(order.rows, order.num_shares, in_groups((kept.shape, kept) for kept in held))
    values = dict(_values_of(reference.ranks[0], whole))
    for module, value in ((lines.module, value) for lines in whole for value in lines.values):
        name = of_value(module, value.number)
        has_rows = rows is not None and name in values and not value.origin.startswith("weight ")
        reorder = rows.reorder_of(values[name]) if rows is not None and has_rows else None
        for other in (name, of_value(module, value.number, gradient=True)):
            if other in values:
                array = reorder(values[other].values) if reorder is not None else values[other].values
                kept = values[other]
                assembling.add(first, other, ("reference", "activation"), kept.shape, array, kept.dtype)
    assembling.lines[first] += tuple(structs.replace(lines, is_unsharded=True) for lines in whole)


def _with_inputs(lines: LinesRecord) -> LinesRecord:
    """Return lines of a job's script, to which what was made before them is given."""
    values = (
        structs.replace(value, origin="input elsewhere") if value.origin == "elsewhere" else value
        for value in lines.values
    )
    return structs.replace(lines, values=tuple(values))


def _values_of(of_rank: OfRank, all_lines: Sequence[LinesRecord]) -> Iterator[tuple[str, Kept]]:
    """Yield the tensors of a rank's lines and their gradients, by name."""
    for lines in all_lines:
        for value in lines.values:
            for is_gradient in (False, True):
                name = of_value(lines.module, value.number, gradient=is_gradient)
                kept = of_rank.activation(name)
                if kept is not None:
                    yield name, kept


@dataclass(frozen=True)
class RowsOfLines:
    """Finds the dims of one process's values that have the rows of the batch.

    Attributes:
        order: The order in which the ranks have the rows.
        num_shares: Among how many of them.
        held: The first rank's values, by shape.
    """

    order: NDArray[np.int64]
    num_shares: int
    held: Mapping[tuple[int, ...], Sequence[Kept]]

    def reorder_of(self, whole: Kept) -> Reorder | None:
        """Return what puts a value's rows into the ranks' order; None if it has no rows, or the ranks have all of it.

        If the first rank has what stands first then, that tells it. A wrong value is told by its shape alone.
        """
        if not whole.is_whole or self._is_held(whole, whole.values):
            return None
        ways = list(self._ways(whole.shape))
        for reorder, part in ways:
            if self._is_held(whole, reorder(whole.values)[part]):
                return reorder
        if any(self._is_held(whole, whole.values[part]) for _, part in ways) or whole.shape in self.held:
            return None
        return next((reorder for reorder, part in ways if whole.values[part].shape in self.held), None)

    def _ways(self, shape: tuple[int, ...]) -> Iterator[tuple[Reorder, tuple[slice, ...]]]:
        """Yield ways to reorder a value, with the part of the result that the first rank may have.

        Rows may stand along any dim, or along the first two of a table of pairs. A dim that was joined with the one
        behind it has a run of indices for each row.
        """
        dims = [dim for dim, size in enumerate(shape) if size and not size % len(self.order)]
        ways: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((dim,), (dim,)) for dim in dims]
        ways += [((0, 1), split) for split in ((0,), (0, 1)) if dims[:2] == [0, 1]]
        for of_rows, split in ways:
            indices = {dim: self._indices(shape[dim]) for dim in of_rows}
            part = (slice(size // self.num_shares if dim in split else None) for dim, size in enumerate(shape))
            yield _taking(indices), tuple(part)

    def _indices(self, size: int) -> NDArray[np.int64]:
        count = size // len(self.order)
        return (self.order[:, None] * count + np.arange(count)).ravel()

    def _is_held(self, whole: Kept, values: NDArray[np.float64]) -> bool:
        near = ELEMENT.get(whole.dtype, EXACT) * (magnitude(whole.values) or 1.0)
        return any(farthest(kept.values, values) <= near for kept in self.held.get(values.shape, ()))


def _taking(indices: Mapping[int, NDArray[np.int64]]) -> Reorder:
    def reorder(values: NDArray[np.float64]) -> NDArray[np.float64]:
        for dim, at in indices.items():
            values = values.take(at, dim)
        return values

    return reorder
