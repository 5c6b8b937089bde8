"""Values of one process, of modules and of lines, with their rows and columns as the ranks of another job have them.

Rows are the batch's, along the first dim. Columns are the tokens of a sequence, along the second: context parallelism
with a causal mask gives each rank a chunk from the head and one from the tail, or every so many tokens.

A sampler deals rows out one by one, so that a rank's part is no run of one process's rows. Which rows each rank has is
known from what the model was given. Whether a value has them along a dim is not, so it is looked for on the first rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
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
    from shardviz.layout.mesh import Mesh

    Reorder = Callable[[NDArray[np.float64]], NDArray[np.float64]]
    Order = NDArray[np.int64]


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
            indices = {dim: _spread(self.order, shape[dim]) for dim in of_rows}
            part = (slice(size // self.num_shares if dim in split else None) for dim, size in enumerate(shape))
            yield _taking(indices), tuple(part)

    def _is_held(self, whole: Kept, values: NDArray[np.float64]) -> bool:
        near = ELEMENT.get(whole.dtype, EXACT) * (magnitude(whole.values) or 1.0)
        return any(farthest(kept.values, values) <= near for kept in self.held.get(values.shape, ()))


def _taking(indices: Mapping[int, NDArray[np.int64]]) -> Reorder:
    def reorder(values: NDArray[np.float64]) -> NDArray[np.float64]:
        for dim, at in indices.items():
            values = values.take(at, dim)
        return values

    return reorder


MAX_ROWS = 1 << 24
"""No longer tensor is put into the order of another job's rows."""


def in_row_order(whole: Kept, dim: int, parts: Sequence[Kept | None], order: Order) -> Kept:
    """Return a tensor with its rows as the ranks have them, if they share its rows.

    Args:
        whole: One process's.
        dim: The dim of its rows.
        parts: What ranks have of it.
        order: Row `order[i]` of one process is the ranks' row `i`.
    """
    is_shared = len(whole.shape) > dim and _is_shared(whole, parts, dim)
    return _in_order(whole, dim, order) if is_shared else whole


def in_column_order(whole: Kept, parts: Sequence[Kept | None], order: Order) -> Kept:
    """Return a tensor with the tokens of each sequence as the ranks have them, if they share these.

    They stand along the first dim that ranks have a part of and that is as long, or each row's stand behind another's.
    """
    long = [dim for dim, size in enumerate(whole.shape) if size == len(order) and _is_shared(whole, parts, dim)]
    if long:
        return _in_order(whole, long[0], order)
    num_rows, rest = divmod(next(iter(whole.shape), 0), len(order))
    if rest or num_rows < 2 or not _is_shared(whole, parts, 0):
        return whole
    return _in_order(whole, 0, (np.arange(num_rows)[:, None] * len(order) + order).ravel())


def _is_shared(whole: Kept, parts: Sequence[Kept | None], dim: int) -> bool:
    """Whether a rank has less than all along a dim."""
    return any(part is not None and part.shape[dim : dim + 1] < (whole.shape[dim],) for part in parts)


def _in_order(whole: Kept, dim: int, order: Order) -> Kept:
    """Return a tensor with the slices of a dim in another order, of which each may have several indices."""
    size = whole.shape[dim]
    if not len(order) <= size <= MAX_ROWS or size % len(order):
        return whole
    return whole.reordered(_spread(order, size), dim)


def _spread(order: Order, size: int) -> Order:
    """Return the order of a dim's indices, each slice having a run of them."""
    per_slice = size // len(order)
    return (order[:, None] * per_slice + np.arange(per_slice)).ravel()


def column_orders(length: int, mesh: Mesh) -> Iterator[tuple[Order, int]]:
    """Yield orders in which ranks may share the tokens of a sequence, and among how many ranks: none has one stretch.

    Example:
        >>> from shardviz.layout.mesh import Mesh
        >>> [order.tolist() for order, _ in column_orders(4, Mesh(("cp",), (2,)))]
        [[0, 3, 1, 2], [0, 2, 1, 3]]
    """
    for size in sorted({mesh.size, *mesh.shape} - {1}):
        if length % (2 * size) == 0:
            chunks = np.split(np.arange(length), 2 * size)
            yield np.concatenate([*chain(*((chunks[at], chunks[-1 - at]) for at in range(size)))]), size
        if length % size == 0 and length > size:
            yield np.arange(length).reshape(-1, size).T.ravel(), size
