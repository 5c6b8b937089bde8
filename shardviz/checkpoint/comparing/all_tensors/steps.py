"""Tensors with values of another step of the run, between those of two checkpoints, or with adapters merged into them.

Frozen weights are the same in neighboring steps. A tensor counts as left over if the other tensors show that both
checkpoints are of one step, or if all tensors that differ come from the same other step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardviz.checkpoint.comparing.all_tensors.odd_files import (
    has_values_of,
    number_of,
    open_steps,
    siblings,
    steps_with,
    tensor_in,
    with_odd_file,
    with_whole_file,
)
from shardviz.checkpoint.comparing.equality import narrower, readable_bits
from shardviz.checkpoint.comparing.one_tensor.changes import factor_text
from shardviz.checkpoint.comparing.outcome import SIDES
from shardviz.checkpoint.formats.headers import read_json
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import (
    AdapterMergedAgain,
    AdapterScaled,
    AdaptersPiledUp,
    AveragedWeights,
    MergedWithAnotherScale,
)
from shardviz.explain.checkpoints.files import OutlierCheckpoint, ValuesOfAnotherStep
from shardviz.relate.casts import cast, is_made, values_of
from shardviz.relate.factors import factor_at_largest
from shardviz.relate.tolerance import EPSILON, FLOATS, LEAST_PART, MANY, SAFETY, STEP
from shardviz.relate.values import blocks, is_alike, magnitude, sampled
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome, Outcomes
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint, Tensor

DOWN, UP = ".lora_A.", ".lora_B."
"""What stands in the names of an adapter's two matrices; their product is added to the weight."""

PREFIXES = ("base_model.model.", "")
"""What stands before a weight's name in an adapter's."""

SETTINGS = "adapter_config.json"

CORNER = 256
"""Rows and columns of a matrix that are looked at: they have its rank, if that is lower."""

GAP = 4.0
"""How much larger than rounding makes it the smallest part of a change is that counts."""


@dataclass(frozen=True, slots=True)
class _Merge:
    """A tensor that has what lies between the other side and a third checkpoint.

    Attributes:
        times: t, if the second has first + t * (third - first).
        rank: The rank of the first's change from the third, if it is low, as an adapter's; else 0.
    """

    times: float
    third: str
    rank: int


def with_merges(outcomes: Outcomes, also: Sequence[Checkpoint]) -> Outcomes:
    """Say which tensors are averages of the other side and a third checkpoint, or have adapters merged otherwise.

    Of matrices that are as narrow as an adapter no rank is low; they have the factor of the others.
    """
    merges = [_merge_of(pair, also) if outcome.is_open else None for outcome, pair in outcomes]
    adapters = {(one.third, factor_text(one.times)) for one in merges if one is not None and one.rank}
    merged = []
    for (outcome, pair), merge in zip(outcomes, merges, strict=True):
        if merge is None:
            merged.append((_explain_adapters(outcome, pair, also) if outcome.is_open else outcome, pair))
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


class Settings(msgspec.Struct):
    """What an adapter was trained with.

    Attributes:
        lora_alpha: The number that is divided by the rank, or by its root.
        use_rslora: Whether it is the root.
        fan_in_fan_out: Whether the weight is stored transposed.
        alpha_pattern: Other numbers for some modules.
    """

    lora_alpha: float
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    alpha_pattern: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was saved on its own."""

    checkpoint: Checkpoint
    settings: Settings

    def matrices_of(self, weight: str) -> tuple[Tensor, Tensor] | None:
        """Return the two matrices for a weight; None if it has none."""
        for prefix in PREFIXES:
            for ending in ("weight", "default.weight"):
                down = f"{prefix}{weight.removesuffix('.weight')}{DOWN}{ending}"
                pair = self.checkpoint.tensors.get(down), self.checkpoint.tensors.get(down.replace(DOWN, UP))
                if pair[0] is not None and pair[1] is not None:
                    return pair[0], pair[1]
        return None

    def scale(self, rank: int) -> float | None:
        """Return what the product of its matrices is multiplied by; None if modules have numbers of their own."""
        if self.settings.alpha_pattern or not rank:
            return None
        return self.settings.lora_alpha / (math.sqrt(rank) if self.settings.use_rslora else rank)


def adapters_among(checkpoints: Iterable[Checkpoint]) -> list[Adapter]:
    """Return the adapters among checkpoints, with their settings."""
    alone = (one for one in checkpoints if one.tensors and all(DOWN in name or UP in name for name in one.tensors))
    read = ((one, _settings(one.path)) for one in alone)
    return [Adapter(one, settings) for one, settings in read if settings is not None]


def _settings(path: Path) -> Settings | None:
    folder = path if path.is_dir() else path.parent
    try:
        return msgspec.json.decode(read_json(folder / SETTINGS), type=Settings)
    except (OSError, ValueError, DumpError, msgspec.DecodeError, RecursionError):
        return None


def with_adapters(outcomes: Iterable[tuple[Outcome, Pair]], adapters: list[Adapter]) -> Iterator[tuple[Outcome, Pair]]:
    """Yield outcomes; those of weights into which an adapter was merged say by which scale."""
    for outcome, pair in outcomes:
        merged = (_merged(outcome, pair, adapter) for adapter in adapters if outcome.verdict == "other")
        yield next((one for one in merged if one is not None), outcome), pair


def _merged(outcome: Outcome, pair: Pair, adapter: Adapter) -> Outcome | None:
    """Return an outcome that says by which scale an adapter was merged; None if it wasn't."""
    matrices = adapter.matrices_of(pair.both[0].name)
    scale = None if matrices is None else _scale_of(pair, matrices, is_transposed=adapter.settings.fan_in_fan_out)
    if matrices is None or scale is None:
        return None
    name, due = printable(adapter.checkpoint.path.name), adapter.scale(matrices[0].shape[0])
    is_due = due is not None and math.isclose(scale, due, rel_tol=STEP)
    why = f"{outcome.why}; it is the first and {factor_text(scale)} times the product of the matrices in {name}"
    if due is None or is_due:
        return outcome.became("other", f"{why}{f', as {SETTINGS} says' if is_due else ''}")
    how = "alpha / sqrt(r)" if adapter.settings.use_rslora else "alpha / r"
    return outcome.became("other", why, MergedWithAnotherScale(name, factor_text(scale), factor_text(due), how))


def _scale_of(pair: Pair, matrices: tuple[Tensor, Tensor], *, is_transposed: bool) -> float | None:
    """Return by what the product of two matrices was multiplied before it was added; None if the change is another."""
    before, after, down, up = (corner_of(side) for side in (*pair.both, *matrices))
    if before is None or after is None or down is None or up is None:
        return None
    if not len(down) == up.shape[1] == matrices[0].shape[0]:
        return None  # the rank is more than a corner has
    product: NDArray[np.float64] = (up @ down).T if is_transposed else up @ down
    change = after - before
    if product.shape != change.shape or not magnitude(product):
        return None
    scale = float(np.vdot(change, product) / np.vdot(product, product))
    epsilon = max(EPSILON[side.dtype] for side in (*pair.both, *matrices))
    allowed = SAFETY * epsilon * (magnitude(before) + magnitude(after) + magnitude(scale * product))
    return scale if scale > 0 and magnitude(change - scale * product) <= allowed else None


def ranks_of_changes(first: Tensor, second: Tensor, base: Tensor) -> tuple[int, int] | None:
    """Return the ranks of two matrices' changes from a base if one has the other's change and more of low rank.

    The two then differ by a change of the remaining rank: changes of different adapters have the sum of their ranks.
    """
    corners = [corner_of(side) for side in (first, second, base)]
    if any(corner is None for corner in corners) or len({side.shape for side in (first, second, base)}) > 1:
        return None
    before, after, start = (corner for corner in corners if corner is not None)
    epsilon = max(EPSILON[side.dtype] for side in (first, second, base))
    ranks = [rank_of(change, start, epsilon) for change in (before - start, after - start, after - before)]
    low, high = sorted(ranks[:2])
    is_low = 0 < low < high < min(start.shape)
    return (ranks[0], ranks[1]) if is_low and ranks[2] == high - low else None


def rank_of_change(side: Tensor, base: Tensor) -> int:
    """Return the rank of a matrix's change from a base if it is low, as an adapter's; else 0."""
    after, start = corner_of(side), corner_of(base)
    if after is None or start is None or after.shape != start.shape:
        return 0
    rank = rank_of(after - start, start, max(EPSILON[side.dtype], EPSILON[base.dtype]))
    return rank if rank < min(start.shape) else 0


def corner_of(side: Tensor) -> NDArray[np.float64] | None:
    """Return the first rows and columns of a matrix of floats; None of anything else."""
    if len(side.shape) != 2 or side.dtype not in FLOATS or (bits := readable_bits(side)) is None:
        return None
    corner = values_of(np.ascontiguousarray(bits[:CORNER, :CORNER]), side.dtype).astype(np.float64)
    return corner if np.isfinite(corner).all() else None


def rank_of(change: NDArray[np.float64], around: NDArray[np.float64], epsilon: float) -> int:
    """Return the rank of a difference of rounded matrices; 0 if rounding may have made its smallest part."""
    parts = np.linalg.svd(change, compute_uv=False)
    rounding = SAFETY * epsilon * float(np.abs(around).max() + np.abs(change).max()) * sum(np.sqrt(change.shape))
    rank = int((parts > rounding).sum())
    return rank if rank and parts[rank - 1] > GAP * rounding else 0


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
