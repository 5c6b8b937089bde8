"""Tensors with another step's values: stale, frozen, from one stale file, or merged.

Frozen weights are the same in neighboring steps. A tensor counts as left over if the other tensors show that both
checkpoints are of one step, or if all tensors that differ come from the same other step. Training changes all parts of
a tensor: if several differ only in the parts that one file has, the file is of another save.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.adapters import adapters_among, with_adapters
from shardviz.checkpoint.comparing.changes import factor_text
from shardviz.checkpoint.comparing.equality import equal, narrower, readable_bits
from shardviz.checkpoint.comparing.low_rank import rank_of_change, ranks_of_changes
from shardviz.checkpoint.comparing.outcome import NOT_COMPARED, SIDES
from shardviz.checkpoint.comparing.series import has_values_of, number_of, open_steps, siblings, steps_with, tensor_in
from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import (
    AdapterMergedAgain,
    AdapterScaled,
    AdaptersPiledUp,
    AveragedWeights,
)
from shardviz.explain.checkpoints.files import (
    FileOfAnotherSave,
    FileOnEitherSide,
    OddFile,
    OutlierCheckpoint,
    ValuesOfAnotherStep,
    WholeFileDiffers,
)
from shardviz.relate.casts import cast, is_made, values_of
from shardviz.relate.factors import factor_at_largest
from shardviz.relate.tolerance import EPSILON, FLOATS, LEAST_PART, MANY, SAFETY
from shardviz.relate.values import blocks, is_alike, sampled
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint, Tensor
    from shardviz.layout.region import Region

    Values = NDArray[np.float64]
    Outcomes = list[tuple[Outcome, Pair]]

SHARED = ("equal", "cast", "permuted", "padded")
"""Verdicts on tensors whose values both checkpoints have."""

MAX_STEPS = 3
FEWEST = 2
"""Tensors that one file cuts into equal and different parts: a single one may be an embedding with unused rows."""

SAME = ("equal", "tied")


@dataclass(frozen=True)
class _OtherSteps:
    """Two checkpoints, and those of other steps of their runs.

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
        outcomes: What became of each tensor.
        before: The first checkpoint.
        after: The second.
        also: Checkpoints of other steps, besides those next to the two.
    """
    if not any(is_open(outcome) for outcome, _ in outcomes):
        return outcomes
    sides = before, after
    first, second = ([*also, *open_steps(siblings(one.path), [it.path for it in sides])] for one in sides)
    steps = _OtherSteps(sides, (first, second), outcomes)
    by_steps = [steps_with(pair, first, second) if is_open(one) else None for one, pair in outcomes]
    each = [one for one, (outcome, _) in zip(by_steps, outcomes, strict=True) if is_open(outcome)]
    whole = set.intersection(*({(one[0], id(step)) for step in one[1]} if one is not None else set() for one in each))
    judged = [
        (outcome if side_and_steps is None else _judge_stale(outcome, steps, pair, *side_and_steps, whole), pair)
        for side_and_steps, (outcome, pair) in zip(by_steps, outcomes, strict=True)
    ]
    merged = list(with_adapters(_with_merges(judged, also), adapters_among(also)))
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
    named = listed((each.path.name for each in there), MAX_STEPS)
    every = [*numbers, *([] if last is None else [last])]
    if number is not None and numbers and min(every) < number < max(every):
        names = listed(dict.fromkeys([*(one.path.name for one in there), steps.sides[held].path.name]), MAX_STEPS)
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
        (_with_stale_part(outcome, pair, steps) if is_open(outcome) else outcome, pair) for outcome, pair in outcomes
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


@dataclass(frozen=True, slots=True)
class _Merge:
    """A tensor that has what lies between the other side and a third checkpoint.

    Attributes:
        times: t, if the second has first + t * (third - first).
        third: The name of the third checkpoint.
        rank: The rank of the first's change from the third, if it is low, as an adapter's; else 0.
    """

    times: float
    third: str
    rank: int


def _with_merges(outcomes: Outcomes, also: Sequence[Checkpoint]) -> Outcomes:
    """Say which tensors are averages of the other side and a third checkpoint, or have adapters merged otherwise.

    Of matrices that are as narrow as an adapter no rank is low; they have the factor of the others.
    """
    merges = [_merge_of(pair, also) if is_open(outcome) else None for outcome, pair in outcomes]
    adapters = {(one.third, factor_text(one.times)) for one in merges if one is not None and one.rank}
    merged = []
    for (outcome, pair), merge in zip(outcomes, merges, strict=True):
        if merge is None:
            merged.append((_explain_adapters(outcome, pair, also) if is_open(outcome) else outcome, pair))
        else:
            is_adapter = (merge.third, factor_text(merge.times)) in adapters
            merged.append((_name_merge(outcome, merge, is_adapter=is_adapter), pair))
    return merged


def _merge_of(pair: Pair, also: Sequence[Checkpoint]) -> _Merge | None:
    for step in also:
        third = tensor_in(step, pair.both[0])
        if third is not None and (times := _merge_factor([*pair.both, third])) is not None:
            return _Merge(times, printable(step.path.name), rank_of_change(pair.both[0], third))
    return None


def _explain_adapters(outcome: Outcome, pair: Pair, also: Sequence[Checkpoint]) -> Outcome:
    """Say that one side has the other's adapter and more, as a third checkpoint shows."""
    for step in also:
        third = tensor_in(step, pair.both[0])
        if third is not None and (added := ranks_of_changes(*pair.both, third)) is not None:
            return _name_adapters(outcome, added, printable(step.path.name))
    return outcome


def _name_adapters(outcome: Outcome, ranks: tuple[int, int], third: str) -> Outcome:
    """Explain a tensor as one side's with further changes of low rank."""
    at = int(ranks[1] > ranks[0])
    low, high = sorted(ranks)
    why = (
        f"{outcome.why}; from {third} the {SIDES[1 - at]} differs by a matrix of rank {low}, the {SIDES[at]} by one of "
        f"rank {high}, and the two by one of rank {high - low}"
    )
    return outcome.became("other", why, AdaptersPiledUp(SIDES[at], low, high, third))


def _name_merge(outcome: Outcome, merge: _Merge, *, is_adapter: bool) -> Outcome:
    """Explain a tensor as a weighted average of two checkpoints, or an adapter merged twice or with another scale."""
    times, third = merge.times, merge.third
    if is_adapter and 0 < times < 1:
        factor = factor_text(1 - times)
        rank = f", a matrix of rank {merge.rank}" if merge.rank else ""
        why = f"{outcome.why}; it is {third} and {factor} times what the {SIDES[0]} adds to that{rank}"
        return outcome.became("other", why, AdapterScaled(SIDES[1], factor, third))
    base, opposite, by = (f"the {SIDES[0]}", third, times) if times > 0 else (third, f"the {SIDES[0]}", 1 - times)
    why = f"{outcome.why}; it is {base} and {factor_text(by)} times what {opposite} adds to that"
    return outcome.became("other", why, AveragedWeights() if by < 1 else AdapterMergedAgain())


def _merge_factor(sides: list[Tensor]) -> float | None:
    """Return t if second = first + t * (third - first); None if there's no t, or it is 0 or 1."""
    start, middle, _ = sides
    types = {side.dtype for side in sides}
    if len(types) > 1 or start.dtype not in FLOATS or start.shape != middle.shape or math.prod(start.shape) < MANY:
        return None
    bits = [bits for side in sides if (bits := readable_bits(side)) is not None]
    if len(bits) < len(sides):
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


def with_odd_file(outcomes: Outcomes, others: tuple[Sequence[Checkpoint], Sequence[Checkpoint]]) -> Outcomes:
    """Say that tensors differ in one file alone, and the step of that file.

    Args:
        outcomes: What became of each tensor.
        others: Checkpoints of other steps, with the first's names and with the second's.
    """
    compared = [(outcome, pair) for outcome, pair in outcomes if outcome.verdict not in NOT_COMPARED]
    sides = [odd_file(at, (_files(outcome, pair, at) for outcome, pair in compared)) for at in (1, 0)]
    odd = [side for side in sides if side is not None]
    if not odd:
        return outcomes
    return [
        (_name_odd_file(outcome, pair, odd, others) if is_open(outcome) else outcome, pair)
        for outcome, pair in outcomes
    ]


def is_open(outcome: Outcome) -> bool:
    """Whether a tensor's values differ and neither a factor nor a rounding explains it."""
    return outcome.verdict == "other" and outcome.explanation is None


def odd_file(at: int, parts: Iterable[tuple[set[str], set[str]]]) -> OddFile | None:
    """Return the only file in which tensors differ, or the only one in which none does.

    Args:
        at: The side.
        parts: For each tensor the files that have equal parts of it, and those that have different ones.
    """
    same: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    for equal_in, odd_in in parts:
        same.update(equal_in)
        odd.update(odd_in)
        cut.update({*equal_in, *odd_in} if equal_in and odd_in else ())
    files = {*same, *odd}
    name = _only_odd_file(same, odd)
    if name is None or cut[name] < FEWEST:
        return None
    return OddFile(at, name, name in odd, same[name] + odd[name], odd[name], len(files) - 1)


def _only_odd_file(same: Counter[str], odd: Counter[str]) -> str | None:
    """Return the one file with all differences, or with none, unlike the others."""
    if len(odd) == 1:
        name = next(iter(odd))
        return name if odd[name] > same[name] else None
    without = [name for name in same if name not in odd]
    return without[0] if len(without) == 1 and all(odd[name] > same[name] for name in odd) else None


def _files(outcome: Outcome, pair: Pair, at: int) -> tuple[set[str], set[str]]:
    """Return the files that have equal parts of a tensor, and those that have different ones."""
    tensor, opposite = pair.sides[at], pair.sides[1 - at]
    if not isinstance(tensor, StoredTensor) or opposite is None:
        return set(), set()
    if outcome.verdict in SAME:
        return set(tensor.files), set()
    return files_of(tensor, opposite)


def files_of(tensor: StoredTensor, opposite: Tensor) -> tuple[set[str], set[str]]:
    """Return the files with parts equal to a second tensor's, and those with different parts."""
    if tensor.shape != opposite.shape:
        return set(), set(tensor.files)
    parts: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in tensor.chunks:
        if chunk.place is not None:
            parts[_is_same(tensor, opposite, chunk.region)].add(chunk.place.file)
    return parts[True], parts[False]


def _is_same(tensor: Tensor, opposite: Tensor, region: Region) -> bool:
    """Whether two tensors have the same values in one part, after a cast if their types differ."""
    narrow = narrower(tensor.dtype, opposite.dtype)
    try:
        tensor_bits, opposite_bits = (cast(one.read(region), one.dtype, narrow) for one in (tensor, opposite))
    except DumpError:
        return False
    return tensor_bits is not None and opposite_bits is not None and equal(tensor_bits, opposite_bits)


def _name_odd_file(
    outcome: Outcome, pair: Pair, sides: list[OddFile], others: Sequence[Sequence[Checkpoint]]
) -> Outcome:
    """Name the odd file; if both sides have one, the step with its values decides."""
    for odd in sides:
        step = next((step for at in (0, 1) for step in others[at] if _is_from(step, pair, odd, at)), None)
        if odd.differs and step is not None:
            return _of_step(outcome, odd, step)
    odd, names = sides[0], (SIDES[sides[0].at], SIDES[1 - sides[0].at])
    if not odd.differs or len(sides) == 1 or not sides[1].differs:
        return outcome.became("other", outcome.why, FileOfAnotherSave(odd, *names))
    return outcome.became("other", outcome.why, FileOnEitherSide(odd, *names, sides[1].file))


def _of_step(outcome: Outcome, odd: OddFile, step: Checkpoint) -> Outcome:
    side, opposite = SIDES[odd.at], SIDES[1 - odd.at]
    why = f"{outcome.why}; the {side} has there what {printable(str(step.path))} has"
    return outcome.became("stale", why, FileOfAnotherSave(odd, side, opposite, printable(step.path.name)))


def _is_from(step: Checkpoint, pair: Pair, odd: OddFile, at: int) -> bool:
    """Whether a different step has the odd file's values of a tensor."""
    held, named = pair.sides[odd.at], pair.sides[at]
    there = None if named is None else tensor_in(step, named)
    if there is None or not isinstance(held, StoredTensor) or there.shape != held.shape:
        return False
    regions = [chunk.region for chunk in held.chunks if chunk.place is not None and chunk.place.file == odd.name]
    return bool(regions) and all(_is_same(held, there, region) for region in regions)


def with_whole_file(outcomes: Outcomes) -> Outcomes:
    """Say of tensors that differ that they are all those of one file."""
    for at in (1, 0):
        name, small = _whole_file(outcomes, at)
        if name:
            whole = WholeFileDiffers(printable(name), SIDES[at], small)
            return [(_of_whole_file(outcome, whole), pair) for outcome, pair in outcomes]
    return outcomes


def _whole_file(outcomes: Outcomes, at: int) -> tuple[str, int]:
    """Return the one file with all tensors that differ, and how many in it don't; else empty.

    Equal scales and biases in it say nothing: they may be all ones or zeros in every save.
    """
    same: Counter[str] = Counter()
    small: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for outcome, pair in outcomes:
        tensor = pair.sides[at]
        if outcome.verdict in NOT_COMPARED or not isinstance(tensor, StoredTensor):
            continue
        if len(tensor.files) != 1 or not (_differs(outcome) or outcome.verdict in (*SAME, "cast")):
            return "", 0
        counts = odd if _differs(outcome) else same if len(tensor.shape) > 1 else small
        counts[tensor.files[0]] += 1
    name = next(iter(odd), "")
    is_whole = len(odd) == 1 and odd[name] >= FEWEST and not same[name] and same.total() >= FEWEST
    return (name, small[name]) if is_whole else ("", 0)


def _differs(outcome: Outcome) -> bool:
    return is_open(outcome) or outcome.verdict == "stale"


def _of_whole_file(outcome: Outcome, whole: WholeFileDiffers) -> Outcome:
    if not _differs(outcome):
        return outcome
    return outcome.became(outcome.verdict, outcome.why, replace(whole, rest=outcome.explanation or whole.rest))
