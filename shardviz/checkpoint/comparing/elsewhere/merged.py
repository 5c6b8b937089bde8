"""Tensors that lie on the line through those of two other checkpoints: a change, such as a LoRA, merged twice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.changed.factors import factor_text
from shardviz.checkpoint.comparing.elsewhere.one_file import SIDES, is_open
from shardviz.checkpoint.comparing.elsewhere.stale import tensor_in
from shardviz.errors import DumpError
from shardviz.explain.conversion import AdapterMergedAgain, AveragedWeights
from shardviz.relate.casts import values_of
from shardviz.relate.factors import factor_at_largest
from shardviz.relate.stored import is_made
from shardviz.relate.tolerance import EPSILON, FLOATS, LEAST_PART, MANY, SAFETY
from shardviz.relate.values import is_alike, sampled
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.elsewhere.one_file import Found
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.records import Checkpoint
    from shardviz.checkpoint.tensor import Tensor

    Values = NDArray[np.float64]


def with_merged(found: Found, also: Sequence[Checkpoint]) -> Found:
    """Say of tensors that differ how often they have what lies between the other side and a third checkpoint."""
    return [(_judged(outcome, pair, also) if is_open(outcome) else outcome, pair) for outcome, pair in found]


def _judged(outcome: Outcome, pair: Pair, also: Sequence[Checkpoint]) -> Outcome:
    for step in also if pair.one is not None and pair.other is not None else ():
        assert pair.one is not None
        assert pair.other is not None
        third = tensor_in(step, pair.one)
        if third is not None and (times := _times([pair.one, pair.other, third])) is not None:
            return _named(outcome, times, printable(step.path.name))
    return outcome


def _named(outcome: Outcome, times: float, third: str) -> Outcome:
    """Name the two that a change lies between: the first and the third, in the order in which it grows."""
    base, other, by = (f"the {SIDES[0]}", third, times) if times > 0 else (third, f"the {SIDES[0]}", 1 - times)
    why = f"{outcome.why}; it is {base} and {factor_text(by)} times what {other} adds to that"
    return outcome.became("other", why, AveragedWeights() if by < 1 else AdapterMergedAgain())


def _times(sides: list[Tensor]) -> float | None:
    """Return the t with which the second is the first + t * (third - first); None where there is none, or 0 or 1."""
    one, other, _ = sides
    types = {side.dtype for side in sides}
    if len(types) > 1 or one.dtype not in FLOATS or one.shape != other.shape or math.prod(one.shape) < MANY:
        return None
    try:
        bits = [side.bits for side in sides]
    except DumpError:
        return None
    first, second, last = (values_of(sampled(part), one.dtype) for part in bits)
    if is_alike(bits[0]) and is_alike(bits[2]):
        return None  # one number each: any third is on their line
    change, room = last - first, SAFETY * EPSILON[one.dtype] * np.abs(first)
    if not np.isfinite([first, second, last]).all() or np.median(np.abs(change) - room) <= 0:
        return None
    times = factor_at_largest(second - first, change)
    at = int(np.abs(change).argmax())
    largest = max(abs(values[at]) for values in (first, second, last))
    rounding = _rounding(one.dtype, times)
    if min(abs(times), abs(times - 1)) <= LEAST_PART:
        return None
    sources, slack = [bits[0], bits[2]], rounding * float(largest / abs(change[at]))
    fits = is_made(bits[1], sources, one.dtype, lambda base, end: base + times * (end - base), rounding, slack)
    return times if fits else None


def _rounding(dtype: str, times: float) -> float:
    """Return how far a value may be from the line, as a part of it, where all three were rounded."""
    return (2 + 2 * abs(times)) * EPSILON[dtype]
