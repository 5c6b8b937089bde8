"""Lines that exchange rows wrongly, as of tokens with experts.

What a rank has of other ranks' rows is no part of the unsharded model's tensors, in whatever layout. Each of its rows
is still a row of one of them, as long as nothing is wrong: rows are looked up, not parts. That row says the weight that
it must meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.fault import Fault, at, fault_at, reached
from shardviz.explain.step.line_rows import ExchangeNotReversed, RowsNotRestored, RowsOfOtherExperts, StrangeRows
from shardviz.explain.step.lines import INDEXING, MisplacedLine
from shardviz.layout.layout import Layout
from shardviz.relate.tolerance import ELEMENT, EXACT
from shardviz.relate.values import error_of, magnitude, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States
    from shardviz.layout.mesh import Mesh

    Array = NDArray[np.float64]

EXCHANGE = "all_to_all"
SENDS = ("send", "isend")
RECEIVES = ("recv", "irecv")
SUMS = ("all_reduce", "reduce", "reduce_scatter")
MOVES = frozenset(
    (
        *("getitem", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "T"),
        *("mT", "contiguous", "expand", "narrow", "clone", "to", "chunk", "split", "cat", "stack", "pad", "detach"),
        "roll",
    )
)
"""Functions that only move numbers."""

COPIES = ("contiguous", "clone", "detach", "view", "reshape", "to")
"""Functions that leave rows in their order."""

ROOM = frozenset(("new_empty", "empty_like", "empty", "zeros", "zeros_like", "new_zeros"))
"""Functions that make room for numbers."""

MATRIX_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm")
"""Functions by which rows meet a weight."""

MAX_MEETINGS = 256
"""Products that are looked at on a side."""


def axes_over(call: Call, mesh: Mesh) -> list[str]:
    """Return the axes along which a collective joins ranks; nothing if a call is and makes none."""
    ranks = set(call.first.ranks)
    return [axis for axis in mesh.long_axes if ranks and ranks >= set(mesh.group_of(min(ranks), axis))]


def exchange_fault(states: States) -> Fault | None:
    """Return the line at which exchanged rows go wrong; None if nothing is exchanged, or ranks also sum rows."""
    lines = states.lines
    if any(map(_is_exchange, lines.calls)) and (twice := _sorted_twice(states)) is not None:
        return twice
    rows = Rows(states)
    return (_not_restored(rows) or _first_strange(rows)) if _are_exchanged(rows) else None


def not_restored_fault(states: States) -> Fault | None:
    """Return the line that leaves exchanged rows in another order than they came in; None if there is none."""
    rows = Rows(states)
    return _not_restored(rows) if _are_exchanged(rows) else None


def _are_exchanged(rows: Rows) -> bool:
    """Whether rows are exchanged, and ranks sum none."""
    calls = rows.states.lines.calls
    summed = (value for call in calls if call.function in SUMS for value in call.outputs)
    return any(map(_is_exchange, calls)) and not any(map(rows.of, summed))


def _sorted_twice(states: States) -> Fault | None:
    """Return the line that puts rows in order again by the index that sorted them, and not by its inverse."""
    sorting: dict[Value, Value] = {}
    for call in states.lines.calls:
        if call.function not in INDEXING or len(call.inputs) != 2 or len(call.outputs) != 1:
            continue
        rows, index = call.inputs
        if states.forward(rows).kind == "right":
            sorting.setdefault(index, rows)
        elif index in sorting and _are_twice_sorted(states, call, sorting[index]):
            begin = f"{reached(call)} is the first wrong line: {call.function} takes rows by the same index"
            producer = next(one for one in states.lines.readers(index) if one.inputs == (sorting[index], index))
            sentence = f"{begin} that sorts them in {at(producer.line, call.line)}, before they are exchanged"
            place = call.inner_line.place
            return fault_at(call, sentence, MisplacedLine(place, call.function, is_of_rank=False))
    return None


def _are_twice_sorted(states: States, call: Call, rows: Value) -> bool:
    """Whether ranks have the rows that are due, in the order that comes of using the call's index twice."""
    (made,), layout = call.outputs, states.forward(rows).layout
    whole = states.reference_of(made)
    held, index = states.held(made), states.held(call.inputs[1])
    if whole is None or layout is None or not whole.ndim or whole.shape[:1] != layout.shape[:1]:
        return False
    if not held or not index:
        return False
    due = Layout(states.mesh, whole.shape, (layout.chains[0], *((),) * (whole.ndim - 1)))
    for rank, region in due.regions():
        part, order = part_of(whole, region), index[rank].astype(np.int64)
        if order.shape != part.shape[:1] or not np.array_equal(np.sort(order), np.arange(len(order))):
            return False
        if error_of(held[rank], part[order][order]) > EXACT:
            return False
    return any(not np.array_equal(order[order.astype(np.int64)], np.arange(len(order))) for order in index.values())


@dataclass
class Rows:
    """The rows of a module's tensors, looked up among those of the unsharded model's."""

    states: States

    def of(self, value: Value) -> dict[int, Array]:
        """Return each rank's rows; empty for what has none, and for whole numbers."""
        held = self.states.held(value) if not self.states.is_index(value) else {}
        if any(array.ndim < 2 or array.shape[-1] < 2 for array in held.values()):
            return {}
        return {rank: array.reshape(-1, array.shape[-1]) for rank, array in held.items()}

    def are_known(self, value: Value) -> bool | None:
        """Whether every row is the unsharded model's, or zeros; None without rows to look up."""
        held = [array for array in self.of(value).values() if array.size]
        if not held:
            return None
        places = [rows_in(array, self._pool.get(array.shape[1], array[:0])) for array in held]
        return all(bool(((at >= 0) | ~array.any(axis=1)).all()) for at, array in zip(places, held, strict=True))

    @cached_property
    def _pool(self) -> Mapping[int, Array]:
        by_size: dict[int, list[Array]] = {}
        for number, record in self.states.lines.wholes.items():
            if len(record.shape) > 1 and record.shape[-1] > 1:
                array = self.states.whole(number)
                if array is not None:
                    by_size.setdefault(array.shape[-1], []).append(array.reshape(-1, array.shape[-1]))
        return {size: np.concatenate(arrays) for size, arrays in by_size.items()}


def _not_restored(rows: Rows) -> Fault | None:
    """Return the line that leaves rows in another order than an exchange brought them, before they are sent back."""
    lines = rows.states.lines
    exchanges = [(call, moved) for call in lines.calls if _is_exchange(call) and (moved := _moved(call, rows))]
    for index, (there, (exchanged, came)) in enumerate(exchanges):
        for back, (sent, returned) in exchanges[index + 1 :]:
            first, last = (_wanted_rows(rows, value) for value in (exchanged, returned))
            made = lines.source(sent, lambda call, given: call.function in COPIES and lines.producer(given) is not None)
            maker = lines.producer(made)
            if first is None or last is None or maker is None:
                continue
            if is_reordered(rows.of(came), rows.of(sent), first, last):
                places = [one.place for one in (maker, there, back)]
                end = f"{at(back.line, there.line)} sends them back"
                sentence = f"{at(there.line)} brings rows; {at(maker.line, there.line)} reorders them; {end}"
                return fault_at(maker, sentence, RowsNotRestored(*places))
    return None


def _wanted_rows(rows: Rows, value: Value) -> Array | None:
    """Return the rows of the unsharded model's tensor that a tensor is compared with, or that it is a copy of."""
    lines = rows.states.lines
    value = lines.source(value, lambda call, _: call.function in COPIES and call.outputs[0] not in lines.wanted)
    whole = rows.states.reference_of(value)
    return None if whole is None or whole.ndim < 2 else whole.reshape(-1, whole.shape[-1])


def _moved(call: Call, rows: Rows) -> tuple[Value, Value] | None:
    """Return an exchange's input and output if they have rows."""
    out = call.outputs[0]
    inputs = [value for value in call.inputs if value != out and rows.are_known(value)]
    return (inputs[-1], out) if inputs and rows.of(out) else None


def is_reordered(
    came: Mapping[int, Array],
    sent: Mapping[int, Array],
    first: Array,
    last: Array,
) -> bool:
    """Whether ranks send back results of all received rows, but in a different order."""
    if len(first) != len(last) or came.keys() != sent.keys():
        return False
    same = rows_in(first, first)  # the same token may go to two experts
    orders = []
    for rank, array in came.items():
        if array.shape[1] != first.shape[1] or sent[rank].shape[1] != last.shape[1]:
            return False
        there, back = rows_in(array, first), rows_in(sent[rank], last)
        if len(there) != len(back) or (there < 0).any() or (back < 0).any():
            return False
        orders.append((same[there], same[back]))
    are_same_rows = all(np.array_equal(np.sort(there), np.sort(back)) for there, back in orders)
    return are_same_rows and any(not np.array_equal(there, back) for there, back in orders)


def _first_strange(rows: Rows) -> Fault | None:
    """Return the first call that makes unknown rows from the unsharded model's."""
    lines = rows.states.lines
    strange: dict[Value, Call] = {}
    innocent: set[int] = set()
    for call in (one for one in lines.calls if one.function not in ROOM):
        origin = next((strange[value] for value in call.inputs if value in strange), None)
        for value in call.outputs:
            are_known = rows.are_known(value)
            is_known = rows.states.placed(value).is_known  # of a table that is split by columns, rows are parts
            if is_known:
                continue
            if are_known is False and origin is None and call.function not in MOVES and not _is_exchange(call):
                strange[value] = call
            elif origin is not None and are_known:
                innocent.add(origin.order)
            elif origin is not None:
                strange[value] = origin
    returned = [strange[value] for value, _ in lines.returned if value in strange]
    guilty = [call for call in returned if call.order not in innocent]
    if not guilty:
        return None
    return _fault_of_strange(rows, guilty[0])


def _fault_of_strange(rows: Rows, call: Call) -> Fault:
    """Return the fault of a call that makes unknown rows: what its rows meet says why, as far as they are known."""
    function = call.function
    sentence = f"{at(call.line)} makes rows that the unsharded model doesn't have; {function} gets rows that it has"
    meetings = meetings_of(rows.states, call) if function in MATRIX_PRODUCTS else None
    if meetings is None or not meetings.is_on_rank:
        return fault_at(call, sentence, StrangeRows(call.place, function, function in MATRIX_PRODUCTS))
    labeled = _mislabeled(rows, call, meetings)
    if labeled is not None:
        sentence = f"{reached(labeled)} numbers rows by other experts than they were sent to; {sentence}"
    labels = labeled.inner_line.place if labeled is not None else ""
    cause = RowsOfOtherExperts(labels or call.inner_line.place, call.place, bool(labels))
    return fault_at(labeled or call, sentence, cause)


def _mislabeled(rows: Rows, call: Call, meetings: Meetings) -> Call | None:
    """Return the call that gives the rows of an exchange numbers of experts, of which some are wrong."""
    lines = rows.states.lines
    makers = sorted((maker for value in call.inputs for maker in lines.makers(value)), key=lambda maker: maker.order)
    for exchange in (maker for maker in makers if _is_exchange(maker)):
        came = rows.of(exchange.outputs[0])
        for maker in (maker for maker in makers if maker.order > exchange.order and len(maker.outputs) == 1):
            numbers = rows.states.held(maker.outputs[0]) if rows.states.is_index(maker.outputs[0]) else {}
            if came and numbers and meetings.are_mislabeled(numbers, came):
                return maker
    return None


def _is_exchange(call: Call) -> bool:
    return call.function.startswith(EXCHANGE)


def exchange_backward(states: States) -> Fault | None:
    """Return the last exchange in an `autograd.Function` of the user's whose backward does not reverse it.

    Whatever only moves numbers has this in common with its right backward: what it is given times the gradient that it
    hands back, summed over ranks, is what it gives times the gradient that it gets.
    """
    for call in reversed(states.lines.calls if states.is_right else ()):
        sending = _sending(states, call) if len(call.first.frames) > call.first.innermost + 1 else None
        if sending is not None and not _is_reversed(states, sending, call):
            sentence = f"in backward {reached(call)} is the first wrong line: it doesn't send back the reverse exchange"
            places = call.place, call.function, call.inner_line.place
            return fault_at(call, f"{sentence} of its gradient", ExchangeNotReversed(*places))
    return None


def _sending(states: States, call: Call) -> Call | None:
    """Return the call that sends what a call brings: itself, if it exchanges, or the send before a receive."""
    if _is_exchange(call):
        return call
    earlier = reversed(states.lines.calls[: call.order]) if call.function in RECEIVES else ()
    return next((other for other in earlier if other.function in SENDS and other.line == call.line), None)


def _is_reversed(states: States, sending: Call, call: Call) -> bool:
    """Whether gradients come back through an exchange as a right backward hands them back."""
    out = call.outputs[0] if call.outputs else None
    inputs = [value for value in sending.inputs if value != out and states.held(value)]
    gave = states.held(out) if out is not None else {}
    inputs = [value for value in inputs if _sorted(states.held(value)) == _sorted(gave)]
    if out is None or len(inputs) != 1:
        return True
    given = states.lines.source(inputs[0], lambda maker, _: maker.line == call.line and maker.function in COPIES)
    readers = states.lines.readers(given)
    share = next((sent for reader in readers if reader.line == call.line and (sent := reader.sent(given))), None)
    if share is None and any(reader.line != call.line for reader in readers):
        return True
    held, back, got = (
        states.held(given),
        states.held(share or given, gradient=True),
        states.held(out, gradient=True),
    )
    if not all(held.keys() == other.keys() for other in (gave, back, got)):
        return True
    if any(back[rank].shape != held[rank].shape or got[rank].shape != gave[rank].shape for rank in held):
        return True
    there = sum(float(np.vdot(held[rank], back[rank])) for rank in held)
    here = sum(float(np.vdot(gave[rank], got[rank])) for rank in held)
    size = sum(float(np.linalg.norm(gave[rank]) * np.linalg.norm(got[rank])) for rank in held)
    return abs(there - here) <= ELEMENT.get(states.held_dtype(inputs[0]), EXACT) * size


def _sorted(held: Mapping[int, Array]) -> list[float]:
    """Return all ranks' numbers, sorted."""
    return sorted(number for array in held.values() for number in array.ravel().tolist())


@dataclass(frozen=True)
class Meetings:
    """The weights of experts that rows meet in some calls of a product.

    Attributes:
        pool: The unsharded model's rows.
        due: The numbers of the weights that each of them meets in the unsharded model, by its first place in the pool.
        of_ranks: On each rank, the number of a weight and the places of the rows that meet it, in order.
    """

    pool: Array
    due: Mapping[int, frozenset[int]]
    of_ranks: Mapping[int, Sequence[tuple[int, list[int]]]]

    @property
    def is_on_rank(self) -> bool:
        """Whether every row is on a rank that has its weight, and some meet another of the rank's."""
        is_wrong = False
        for meetings in self.of_ranks.values():
            there = {weight for weight, _ in meetings}
            for weight, places in meetings:
                if not all(self.due[place] & there for place in places):
                    return False
                is_wrong |= any(weight not in self.due[place] for place in places)
        return is_wrong

    def are_mislabeled(self, labels: Mapping[int, Array], came: Mapping[int, Array]) -> bool:
        """Whether numbers of the rows that came say which of a rank's weights they meet, and are wrong for some."""
        is_wrong = False
        for rank, meetings in self.of_ranks.items():
            weights, numbers, rows = [weight for weight, _ in meetings], labels.get(rank), came.get(rank)
            if (
                numbers is None
                or rows is None
                or numbers.shape != rows.shape[:1]
                or rows.shape[1:] != self.pool.shape[1:]
            ):
                return False
            if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= len(weights):
                return False
            met = [weights[int(number)] for number in numbers]
            places = [int(place) for place in rows_in(rows, self.pool)]
            counts = [(weight, len(of_weight)) for weight, of_weight in meetings]
            if -1 in places or any(met.count(weight) != count for weight, count in counts):
                return False
            is_wrong |= any(weight not in self.due[place] for weight, place in zip(met, places, strict=True))
        return is_wrong


def meetings_of(states: States, call: Call) -> Meetings | None:
    """Return what rows meet in the products on a call's line; None if a weight or a row of it isn't known."""
    lines = states.lines
    wholes = [line for line in lines.unsharded.lines if line.function in MATRIX_PRODUCTS and len(line.inputs) == 2]
    pairs: list[tuple[Array, Array]] = []
    for line in wholes[:MAX_MEETINGS]:
        given = [array for number in line.inputs if (array := states.whole(number)) is not None]
        pairs += _pairs(*given) if len(given) == 2 else ()
    rows, of_ranks = [], {rank: list[tuple[int, list[int]]]() for rank in lines.sharded}
    calls = [other for other in lines.calls if other.inner_line == call.inner_line and len(other.inputs) == 2]
    calls = [other for other in calls if other.function == call.function][:MAX_MEETINGS]
    width = next((array.shape[-1] for array in states.held(call.inputs[0]).values()), 0)
    weights: list[Array] = []
    numbers: list[int] = []
    for array, weight in pairs:
        if array.shape[1] == width:
            number = _number(weights, weight)
            weights += [weight] if number is None else []
            rows.append(array)
            numbers += [len(weights) - 1 if number is None else number] * len(array)
    if not rows or len(calls) < 1:
        return None
    pool = np.concatenate(rows)
    due: dict[int, frozenset[int]] = {}
    for place, number in zip(rows_in(pool, pool), numbers, strict=True):
        due[int(place)] = due.get(int(place), frozenset()) | {number}
    made: set[Value] = set()
    for other in calls:
        if other.inputs[0] in made:
            continue  # a second product, of what the first makes
        made |= lines.derived(other)
        sides = [states.held(value) for value in other.inputs]
        for rank, meetings in of_ranks.items():
            for array, weight in _pairs(*(held[rank] for held in sides)) if all(rank in held for held in sides) else ():
                known, rows_met = _number(weights, weight), array[array.any(1)]
                places = rows_in(rows_met, pool).tolist() if array.shape[1] == width else [-1]
                if known is None or -1 in places:
                    return None
                meetings.append((known, places))
    return Meetings(pool, due, of_ranks)


def _pairs(rows: Array, weight: Array) -> Iterator[tuple[Array, Array]]:
    """Yield rows, with the matrix that they meet: of a batch, each with its own."""
    if rows.ndim == 3 and weight.ndim == 3 and len(rows) == len(weight):
        yield from zip(rows, weight, strict=True)
    elif rows.ndim == 2 and weight.ndim == 2:
        yield rows, weight


def _number(weights: Sequence[Array], weight: Array) -> int | None:
    """Return which of some weights another is; None if it is none of them."""
    alike = (at for at, one in enumerate(weights) if one.shape == weight.shape and error_of(weight, one) <= EXACT)
    return next(alike, None)


def rows_in(rows: Array, pool: Array) -> NDArray[np.int64]:
    """Return the first place of each row among others; -1 for one that is not among them."""
    if not len(pool) or not len(rows):
        return np.full(len(rows), -1)
    along = np.random.default_rng(0).standard_normal(pool.shape[1])
    order = np.argsort(pool @ along, kind="stable")
    keys, projections = (pool @ along)[order], rows @ along
    near = EXACT * max(magnitude(pool), 1e-30)
    slack = near * float(np.abs(along).sum())
    places = np.full(len(rows), -1)
    for row, (low, high) in enumerate(
        zip(*(np.searchsorted(keys, projections + by) for by in (-slack, slack)), strict=True)
    ):
        at = order[low:high]
        at = at[np.max(np.abs(pool[at] - rows[row]), axis=1, initial=0.0) <= near]
        places[row] = at.min(initial=len(pool)) if len(at) else -1
    return places
