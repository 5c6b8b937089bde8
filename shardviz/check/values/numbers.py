"""Numbers in a dump: its nested lists as flat ones, whether they are all one number, and where two of them differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.dump.content import leaves
from shardviz.layout.region import index_of
from shardviz.relate.tolerance import STEP

if TYPE_CHECKING:
    from shardviz.dump.dump import Shard

LEAST_ALIKE = 3


def flat_values(shard: Shard) -> list[float | str] | None:
    """Return a shard's values, row-major; None if the dump has only their digest."""
    return leaves(shard.body.values) if shard.body.values is not None else None


def is_constant(shard: Shard) -> bool:
    """Whether a shard says nothing about where it is from: all its elements are one number, or it has just one."""
    if shard.body.constant or math.prod(shard.body.local_shape) < 2:
        return True
    values = flat_values(shard)
    return values is not None and len(set(values)) == 1


def first_difference(shard: Shard, other: Shard) -> str:
    """Say at which index two copies differ first, and what each has there; empty if the dump has no values."""
    ours, theirs = flat_values(shard), flat_values(other)
    if ours is None or theirs is None:
        return ""
    if len(ours) != len(theirs) or shard.body.dtype != other.body.dtype:
        first = f"{shard.body.dtype}{list(shard.body.local_shape)}"
        return f"rank {shard.rank} has {first}, rank {other.rank} {other.body.dtype}{list(other.body.local_shape)}"
    at = next((index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return ""
    pair = (2,) if shard.body.dtype.startswith("complex") else ()  # written as real and imaginary part
    shape = (*shard.body.local_shape, *pair)
    index = index_of(at, shape)
    return f"at {index} of the shard rank {shard.rank} has {_said(ours[at])}, rank {other.rank} {_said(theirs[at])}"


def same_step(copy: Shard, other: Shard) -> tuple[float, float]:
    """Return the number by which all elements of a second copy differ from a first, and the factor; 0 if by none.

    Copies of fewer than three elements show no rule.
    """
    pairs = list(zip(flat_values(copy) or (), flat_values(other) or (), strict=False))
    if len(pairs) < LEAST_ALIKE or not all(isinstance(value, float | int) for pair in pairs for value in pair):
        return 0, 0
    numbers = [(float(first), float(second)) for first, second in pairs]
    step = _one_of([second - first for first, second in numbers])
    return step, 0 if step or not all(first for first, _ in numbers) else _one_of([b / a for a, b in numbers])


def _one_of(numbers: list[float]) -> float:
    """Return what all numbers are, rounding apart; 0 if they are not one finite number."""
    first = numbers[0]
    is_one = math.isfinite(first) and all(math.isclose(number, first, rel_tol=STEP) for number in numbers)
    return first if is_one else 0


def _said(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
