"""Tensors with the values of another step of the run, which stands in the same folder.

Frozen weights are the same in neighboring steps. A tensor counts as left over if the other tensors show that both
checkpoints are of one step, or if all tensors that differ come from the same other step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.all_tensors.merges import adapters_among, with_adapters, with_merges
from shardviz.checkpoint.comparing.all_tensors.odd_files import with_odd_file, with_whole_file
from shardviz.checkpoint.comparing.all_tensors.series import (
    has_values_of,
    number_of,
    open_steps,
    siblings,
    steps_with,
    tensor_in,
)
from shardviz.checkpoint.comparing.equality import narrower, readable_bits
from shardviz.checkpoint.comparing.outcome import SIDES
from shardviz.explain.checkpoints.files import OutlierCheckpoint, ValuesOfAnotherStep
from shardviz.relate.casts import cast
from shardviz.relate.tolerance import MANY
from shardviz.relate.values import blocks, is_alike
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.checkpoint.comparing.outcome import Outcome, Outcomes
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint, Tensor


SHARED = ("equal", "cast", "permuted", "padded")
"""Verdicts on tensors whose values both checkpoints have."""


@dataclass(frozen=True)
class _OtherSteps:
    """Two checkpoints, and those of other steps of their runs.

    Attributes:
        others: The other steps of each.
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
                (own_tensor := pair.sides[side]) is not None
                and not is_alike(own_tensor.bits)
                and tensor_in(step, own_tensor) is not None
                and not has_values_of(step, own_tensor, own_tensor)
                for outcome, pair in self.outcomes
                if outcome.verdict in SHARED
            )
        return self._same[key]

    def number(self, step: Checkpoint, side: int) -> int | None:
        """Return the number of a step among those of a side."""
        return number_of(step.path, self.sides[side].path)


def with_left_over(outcomes: Outcomes, before: Checkpoint, after: Checkpoint, also: Sequence[Checkpoint]) -> Outcomes:
    """Say which tensors are left over from another step.

    Args:
        also: Checkpoints of other steps, besides those next to the two.
    """
    if not any(outcome.is_open for outcome, _ in outcomes):
        return outcomes
    sides = before, after
    first, second = ([*also, *open_steps(siblings(one.path), [it.path for it in sides])] for one in sides)
    steps = _OtherSteps(sides, (first, second), outcomes)
    by_steps = [steps_with(pair, first, second) if one.is_open else None for one, pair in outcomes]
    each = [one for one, (outcome, _) in zip(by_steps, outcomes, strict=True) if outcome.is_open]
    whole = set.intersection(*({(one[0], id(step)) for step in one[1]} if one is not None else set() for one in each))
    judged = [
        (outcome if side_and_steps is None else _judge_stale(outcome, steps, pair, *side_and_steps, whole), pair)
        for side_and_steps, (outcome, pair) in zip(by_steps, outcomes, strict=True)
    ]
    merged = list(with_adapters(with_merges(judged, also), adapters_among(also)))
    return with_whole_file(with_stale_parts(with_odd_file(merged, steps.others), steps))


def _judge_stale(
    outcome: Outcome,
    steps: _OtherSteps,
    pair: Pair,
    held: int,
    there: tuple[Checkpoint, ...],
    whole: set[tuple[int, int]],
) -> Outcome:
    """Judge a tensor that one side has as some other steps have it."""
    side, step = 1 - held, there[0]
    number, last = steps.number(steps.sides[side], side), steps.number(steps.sides[held], side)
    numbers = [one for one in (steps.number(each, side) for each in there) if one is not None]
    named = listed(each.path.name for each in there)
    every = [*numbers, *([] if last is None else [last])]
    if number is not None and numbers and min(every) < number < max(every):
        names = listed(dict.fromkeys([*(one.path.name for one in there), steps.sides[held].path.name]))
        if last is not None and last > number and _is_trained(pair, side, there, steps):
            return _explain_stale(outcome, steps, pair, held, step)
        why = f"{outcome.why}; {names} have the same, before and after it"
        return outcome.became("other", why, OutlierCheckpoint(SIDES[side], SIDES[held], step.path.name))
    earlier = last is None or not numbers or min(numbers) < last
    if earlier and (steps.is_same_step(side, step) or (last is None and (held, id(step)) in whole)):
        return _explain_stale(outcome, steps, pair, held, step)
    do = "does" if len(there) == 1 else "do"
    why = f"{outcome.why}; the {SIDES[held]} has it as {named} {do}: it was frozen in between, or one is left over"
    return outcome.became("other", why)


def _is_trained(pair: Pair, side: int, there: tuple[Checkpoint, ...], steps: _OtherSteps) -> bool:
    """Whether a third step has a tensor with other values than both sides: training changes it."""
    thirds = [step for step in steps.others[side] if all(step is not one for one in there)]
    return any(
        tensor_in(step, pair.both[side]) is not None
        and not any(has_values_of(step, pair.both[side], values) for values in pair.both)
        for step in thirds
    )


def _explain_stale(outcome: Outcome, steps: _OtherSteps, pair: Pair, held: int, step: Checkpoint) -> Outcome:
    """Say that a side has a tensor of another step."""
    side = 1 - held
    number, other_number = (steps.number(one, side) for one in (steps.sides[side], step))
    is_later = number is not None and other_number is not None and other_number > number
    own_tensor = pair.sides[side]
    thirds = (one for one in steps.others[side] if one is not step)
    is_sure = own_tensor is not None and any(tensor_in(one, own_tensor) is not None for one in thirds)
    doubt = "" if is_sure else SIDES[side]
    cause = ValuesOfAnotherStep(step.path.name, is_later, doubt)
    return outcome.became("stale", f"the {SIDES[held]} has here what {step.path} has", cause)


def with_stale_parts(outcomes: Outcomes, steps: _OtherSteps) -> Outcomes:
    """Explain tensors that are stale only in part, once the rest shows that the steps match."""
    if number_of(steps.sides[0].path, steps.sides[1].path) is not None:
        return outcomes
    return [
        (_with_stale_part(outcome, pair, steps) if outcome.is_open else outcome, pair) for outcome, pair in outcomes
    ]


def _with_stale_part(outcome: Outcome, pair: Pair, steps: _OtherSteps) -> Outcome:
    for held, side in ((1, 0), (0, 1)):
        for step in steps.others[side]:
            there = tensor_in(step, pair.both[side])
            if there is not None and _has_part_of(pair.both[held], pair.both[side], there):
                stale = _explain_stale(outcome, steps, pair, held, step)
                return replace(stale, why=f"{outcome.why}; the {SIDES[held]} has there what {step.path} has")
    return outcome


def _has_part_of(held: Tensor, other: Tensor, old: Tensor) -> bool:
    """Whether a tensor has the values of an older one just where it differs from another."""
    sides = held, other, old
    bits = [values for side in sides if (values := readable_bits(side)) is not None]
    if len(bits) < len(sides) or not held.shape == other.shape == old.shape:
        return False
    narrow = narrower(held.dtype, narrower(other.dtype, old.dtype))
    count, is_moved, seen = 0, False, set[int]()
    for parts in zip(*map(blocks, bits), strict=True):
        mine, theirs, third = (cast(part, side.dtype, narrow) for part, side in zip(parts, sides, strict=True))
        if mine is None or theirs is None or third is None:
            return False
        odd = mine != theirs
        if (mine[odd] != third[odd]).any():
            return False
        count += int(odd.sum())
        is_moved = is_moved or bool((mine != third).any())
        seen |= set(mine[odd][:MANY].tolist()) if len(seen) < MANY else set()
    return is_moved and count >= MANY and len(seen) > 1
