"""Matrices that the second checkpoint has under another name and transposed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.orders import name_change
from shardviz.checkpoint.comparing.undo import cause_of_order
from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.relate.values import is_alike

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.common import Outcomes
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair


MATRIX = 2
"""Dims of a matrix."""


def with_transposes(outcomes: Outcomes) -> Outcomes:
    """Pair each matrix that only the first has with one that only the second has, if that is it transposed."""
    added = {id(pair): pair for outcome, pair in outcomes if outcome.verdict == "added"}
    joined: dict[int, tuple[Outcome, Pair]] = {}
    taken: set[int] = set()
    for outcome, pair in outcomes:
        matching = [other for at, other in added.items() if at not in taken and _is_turned(pair, other)]
        if outcome.verdict == "missing" and len(matching) == 1:
            taken.add(id(matching[0]))
            joined[id(pair)] = _turned(outcome, replace(pair, second=matching[0].second))
    kept = ((outcome, pair) for outcome, pair in outcomes if id(pair) not in taken)
    return [joined.get(id(pair), (outcome, pair)) for outcome, pair in kept]


def _is_turned(pair: Pair, other: Pair) -> bool:
    """Whether a tensor of the second is one of the first, transposed, and that is certain."""
    first, second = pair.first, other.second
    if not isinstance(first, StoredTensor) or not isinstance(second, StoredTensor) or len(first.shape) != MATRIX:
        return False
    if first.dtype != second.dtype or first.shape != second.shape[::-1]:
        return False
    try:
        before, after = first.bits.T, second.bits
    except DumpError:
        return False
    return _are_equal(before[:1], after[:1]) and not is_alike(after) and _are_equal(before, after)


def _are_equal(first: NDArray[Any], second: NDArray[Any]) -> bool:
    return bool(np.array_equal(first, second))


def _turned(outcome: Outcome, pair: Pair) -> tuple[Outcome, Pair]:
    first, second = pair.both
    order, cause = name_change(first.bits, second.bits, ()), cause_of_order(first.bits, second.bits)
    return outcome.became("permuted", order, cause, other=second.name), pair
