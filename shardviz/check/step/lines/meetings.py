"""The weights of experts that routed rows meet on a rank, compared with the unsharded model.

Each row that ranks exchange is a row of the unsharded model's, which says the weight that it must meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.relate.tolerance import EXACT
from shardviz.relate.values import error_of, magnitude

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.lines.calls import Call, Value
    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.lines import FrameRecord

    Array = NDArray[np.float64]

PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm")
"""Functions by which rows meet a weight."""

MAX_MEETINGS = 256
"""Products that are looked at on a side."""


@dataclass(frozen=True)
class Meetings:
    """The weights that rows meet in some calls of a product.

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
            places = [int(place) for place in places_of(rows, self.pool)]
            counts = [(weight, len(of_weight)) for weight, of_weight in meetings]
            if -1 in places or any(met.count(weight) != count for weight, count in counts):
                return False
            is_wrong |= any(weight not in self.due[place] for weight, place in zip(met, places, strict=True))
        return is_wrong


def meetings_of(states: States, call: Call) -> Meetings | None:
    """Return what rows meet in the products on a call's line; None if a weight or a row of it isn't known."""
    lines = states.lines
    wholes = [line for line in lines.unsharded.lines if line.function in PRODUCTS and len(line.inputs) == 2]
    pairs: list[tuple[Array, Array]] = []
    for line in wholes[:MAX_MEETINGS]:
        given = [array for number in line.inputs if (array := states.whole(number)) is not None]
        pairs += _pairs(*given) if len(given) == 2 else ()
    rows, of_ranks = [], {rank: list[tuple[int, list[int]]]() for rank in lines.sharded}
    calls = [other for other in lines.calls if _line(other) == _line(call) and len(other.inputs) == 2]
    calls = [other for other in calls if other.first.function == call.first.function][:MAX_MEETINGS]
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
    for place, number in zip(places_of(pool, pool), numbers, strict=True):
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
                places = places_of(rows_met, pool).tolist() if array.shape[1] == width else [-1]
                if known is None or -1 in places:
                    return None
                meetings.append((known, places))
    return Meetings(pool, due, of_ranks)


def _line(call: Call) -> FrameRecord:
    return call.first.frames[-1]


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


def places_of(rows: NDArray[np.float64], pool: NDArray[np.float64]) -> NDArray[np.int64]:
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
