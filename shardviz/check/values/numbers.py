"""Numbers in a dump: its nested lists as flat ones, whether they are all one number, and where two of them differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardviz.dump.content import leaves
from shardviz.layout.region import index_of

if TYPE_CHECKING:
    from shardviz.dump.dump import Shard

LEAST_ALIKE = 3
ALIKE = 1e-5
"""Relative, of differences and factors: those of float32 numbers are rounded."""


def flat_values(shard: Shard) -> list[float | str] | None:
    """Return a shard's values, row-major; None where the dump has only their digest."""
    return leaves(shard.body.values) if shard.body.values is not None else None


def is_constant(shard: Shard) -> bool:
    """Whether a shard says nothing about where it is from: all its elements are one number, or it has just one."""
    if shard.body.constant or math.prod(shard.body.local_shape) < 2:
        return True
    values = flat_values(shard)
    return values is not None and len(set(values)) == 1


def first_difference(one: Shard, other: Shard) -> str:
    """Say at which index two copies differ first, and what each has there; empty where the dump has no values."""
    ours, theirs = flat_values(one), flat_values(other)
    if ours is None or theirs is None:
        return ""
    if len(ours) != len(theirs) or one.body.dtype != other.body.dtype:
        first = f"{one.body.dtype}{list(one.body.local_shape)}"
        return f"rank {one.rank} has {first}, rank {other.rank} {other.body.dtype}{list(other.body.local_shape)}"
    at = next((index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return ""
    pair = (2,) if one.body.dtype.startswith("complex") else ()  # written as real and imaginary part
    shape = (*one.body.local_shape, *pair)
    index = index_of(at, shape)
    return f"at {index} of the shard rank {one.rank} has {_said(ours[at])}, rank {other.rank} {_said(theirs[at])}"


def same_step(one: Shard, other: Shard) -> str:
    """Say by what all elements of a second copy differ from those of a first: `+0.5` or `times 2`; empty where by none.

    Copies of fewer than three elements show no rule.
    """
    ours, theirs = flat_values(one), flat_values(other)
    pairs = list(zip(ours or (), theirs or (), strict=False))
    if len(pairs) < LEAST_ALIKE or not all(isinstance(value, float | int) for pair in pairs for value in pair):
        return ""
    steps = [float(b) - float(a) for a, b in pairs]
    factors = [float(b) / float(a) for a, b in pairs if a]
    if steps[0] and all(math.isclose(step, steps[0], rel_tol=ALIKE) for step in steps):
        return f"{steps[0]:+.6g}"
    if len(factors) == len(pairs) and all(math.isclose(factor, factors[0], rel_tol=ALIKE) for factor in factors):
        return f"times {factors[0]:.6g}"
    return ""


def _said(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
