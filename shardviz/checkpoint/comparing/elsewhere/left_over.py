"""A tensor of one checkpoint that another step has, too: left over from that step, or frozen in between.

Frozen weights are the same in neighboring steps. A tensor counts as left over where the other tensors show that both
checkpoints are of one step, or where all tensors that differ come from the same other step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.changed.numbers import factor_text
from shardviz.checkpoint.comparing.elsewhere import stale
from shardviz.checkpoint.comparing.elsewhere.one_file import SIDES, is_open, with_odd_file, with_whole_file
from shardviz.checkpoint.comparing.elsewhere.stale import tensor_in
from shardviz.errors import DumpError
from shardviz.explain.conversion import AdapterMergedAgain, AveragedWeights
from shardviz.explain.files import OutlierCheckpoint, ValuesOfAnotherStep
from shardviz.relate.casts import values_of
from shardviz.relate.factors import factor_at_largest
from shardviz.relate.stored import is_made
from shardviz.relate.tolerance import EPSILON, FLOATS, LEAST_PART, MANY, SAFETY
from shardviz.relate.values import is_alike, sampled
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.elsewhere.one_file import Outcomes
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint
    from shardviz.checkpoint.tensor import Tensor

    Values = NDArray[np.float64]

SHARED = ("equal", "cast", "permuted", "padded")
"""Verdicts on tensors whose values both checkpoints have."""

MAX_STEPS = 3


@dataclass(frozen=True)
class _Steps:
    """Two checkpoints among others of their runs.

    Attributes:
        sides: The two.
        others: The other steps of each.
        outcomes: What became of each tensor.
    """

    sides: tuple[Checkpoint, Checkpoint]
    others: tuple[list[Checkpoint], list[Checkpoint]]
    outcomes: Outcomes
    _same: dict[tuple[int, int], bool] = field(default_factory=dict)

    def is_same_step(self, side: int, step: Checkpoint) -> bool:
        """Whether the two share values that another step, of the side `side`, does not have."""
        key = side, id(step)
        if key not in self._same:
            self._same[key] = any(
                (mine := (pair.first, pair.second)[side]) is not None
                and not is_alike(mine.bits)
                and stale.tensor_in(step, mine) is not None
                and not stale.has(step, mine, mine)
                for outcome, pair in self.outcomes
                if outcome.verdict in SHARED
            )
        return self._same[key]

    def number(self, step: Checkpoint, side: int) -> int | None:
        """Return the number of a step among those of a side."""
        return stale.number_of(step.path, self.sides[side].path)


def with_left_over(outcomes: Outcomes, before: Checkpoint, after: Checkpoint, also: Sequence[Checkpoint]) -> Outcomes:
    """Say which tensors are left over from another step.

    Args:
        outcomes: What became of each tensor.
        before: The first checkpoint.
        after: The second.
        also: Checkpoints of other steps, besides those next to the two.
    """
    if not any(is_open(outcome) for outcome, _ in outcomes):
        return outcomes
    sides = before, after
    first, second = ([*also, *stale.opened(stale.siblings(one.path), [it.path for it in sides])] for one in sides)
    steps = _Steps(sides, (first, second), outcomes)
    seen = [stale.steps_with(pair, first, second) if is_open(one) else None for one, pair in outcomes]
    whole = _whole([one for one, (outcome, _) in zip(seen, outcomes, strict=True) if is_open(outcome)])
    judged = [
        (outcome if one is None else _judged(outcome, steps, pair, *one, whole), pair)
        for one, (outcome, pair) in zip(seen, outcomes, strict=True)
    ]
    return with_whole_file(with_odd_file(with_merged(judged, also), steps.others))


def _whole(seen: Sequence[tuple[int, tuple[Checkpoint, ...]] | None]) -> set[tuple[int, int]]:
    """Return the sides and steps for which all tensors that differ are of that step."""
    each = [{(one[0], id(step)) for step in one[1]} if one is not None else set() for one in seen]
    return set.intersection(*each)


def _judged(
    outcome: Outcome, steps: _Steps, pair: Pair, held: int, there: tuple[Checkpoint, ...], whole: set[tuple[int, int]]
) -> Outcome:
    """Judge a tensor that one side has as some other steps have it."""
    side, step = 1 - held, there[0]
    number, last = steps.number(steps.sides[side], side), steps.number(steps.sides[held], side)
    numbers = [one for one in (steps.number(each, side) for each in there) if one is not None]
    named = listed((each.path.name for each in there), MAX_STEPS)
    every = [*numbers, *([] if last is None else [last])]
    if number is not None and numbers and min(every) < number < max(every):
        names = listed(dict.fromkeys([*(one.path.name for one in there), steps.sides[held].path.name]), MAX_STEPS)
        why = f"{outcome.why}; {names} have the same, before and after it"
        return outcome.became("other", why, OutlierCheckpoint(SIDES[side]))
    earlier = last is None or not numbers or min(numbers) < last
    if earlier and (steps.is_same_step(side, step) or (last is None and (held, id(step)) in whole)):
        return _stale(outcome, steps, pair, held, step)
    do = "does" if len(there) == 1 else "do"
    why = f"{outcome.why}; the {SIDES[held]} has it as {named} {do}: it was frozen in between, or one is left over"
    return outcome.became("other", why)


def _stale(outcome: Outcome, steps: _Steps, pair: Pair, held: int, step: Checkpoint) -> Outcome:
    """Say that a side has a tensor of another step."""
    side = 1 - held
    number, other = (steps.number(one, side) for one in (steps.sides[side], step))
    is_later = number is not None and other is not None and other > number
    mine = (pair.first, pair.second)[side]
    thirds = (one for one in steps.others[side] if one is not step)
    is_sure = mine is not None and any(stale.tensor_in(one, mine) is not None for one in thirds)
    doubt = "" if is_sure else SIDES[side]
    cause = ValuesOfAnotherStep(step.path.name, is_later, doubt)
    return outcome.became("stale", f"the {SIDES[held]} has here what {step.path} has", cause)


def with_merged(outcomes: Outcomes, also: Sequence[Checkpoint]) -> Outcomes:
    """Say of tensors that differ how often they have what lies between the other side and a third checkpoint."""
    return [(_merged(outcome, pair, also) if is_open(outcome) else outcome, pair) for outcome, pair in outcomes]


def _merged(outcome: Outcome, pair: Pair, also: Sequence[Checkpoint]) -> Outcome:
    for step in also if pair.first is not None and pair.second is not None else ():
        assert pair.first is not None
        assert pair.second is not None
        third = tensor_in(step, pair.first)
        if third is not None and (times := _times([pair.first, pair.second, third])) is not None:
            return _named_merged(outcome, times, printable(step.path.name))
    return outcome


def _named_merged(outcome: Outcome, times: float, third: str) -> Outcome:
    """Name the two that a change lies between: the first and the third, in the order in which it grows."""
    base, other, by = (f"the {SIDES[0]}", third, times) if times > 0 else (third, f"the {SIDES[0]}", 1 - times)
    why = f"{outcome.why}; it is {base} and {factor_text(by)} times what {other} adds to that"
    return outcome.became("other", why, AveragedWeights() if by < 1 else AdapterMergedAgain())


def _times(sides: list[Tensor]) -> float | None:
    """Return the t with which the second is the first + t * (third - first); None if there is none, or 0 or 1."""
    start, middle, _ = sides
    types = {side.dtype for side in sides}
    if len(types) > 1 or start.dtype not in FLOATS or start.shape != middle.shape or math.prod(start.shape) < MANY:
        return None
    try:
        bits = [side.bits for side in sides]
    except DumpError:
        return None
    first, second, last = (values_of(sampled(part), start.dtype) for part in bits)
    if is_alike(bits[0]) and is_alike(bits[2]):
        return None  # one number each: any third is on their line
    change, room = last - first, SAFETY * EPSILON[start.dtype] * np.abs(first)
    if not np.isfinite([first, second, last]).all() or np.median(np.abs(change) - room) <= 0:
        return None
    times = factor_at_largest(second - first, change)
    at = int(np.abs(change).argmax())
    largest = max(abs(values[at]) for values in (first, second, last))
    rounding = (2 + 2 * abs(times)) * EPSILON[start.dtype]
    if min(abs(times), abs(times - 1)) <= LEAST_PART:
        return None
    sources, slack = [bits[0], bits[2]], rounding * float(largest / abs(change[at]))
    fits = is_made(bits[1], sources, start.dtype, lambda base, end: base + times * (end - base), rounding, slack)
    return times if fits else None
