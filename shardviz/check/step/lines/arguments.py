"""What calls are given beside tensors: numbers and words that are not the unsharded model's, and random generators."""

from __future__ import annotations

import math
from contextlib import suppress
from fractions import Fraction
from typing import TYPE_CHECKING

from shardviz.check.step.lines.states import MAX_RATIO
from shardviz.explain.step.lines import DRAWS
from shardviz.relate.tolerance import EXACT, SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.lines.calls import Call
    from shardviz.check.step.lines.states import States
    from shardviz.layout.mesh import Mesh

ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "truediv", "rtruediv", "pow", "rpow", "remainder", "clamp")
"""Functions of a tensor and a number that is no size of their result."""


def other_number(call: Call) -> tuple[float, float] | None:
    """Return the one number that all ranks give a call and the unsharded model does not, and the unsharded model's."""
    pairs = list(_other_arguments(call))
    if len(pairs) != 1:
        return None
    if all(map(_is_size, pairs[0])) and call.first.function not in ARITHMETIC:
        return None
    with suppress(ValueError):  # `True` is no number, nor is what a damaged file has
        return float(pairs[0][0]), float(pairs[0][1])
    return None


def other_arguments(states: States, call: Call) -> tuple[str, str]:
    """Return what ranks give a call instead of what the unsharded model gives it; empty if a part may need it.

    Whole numbers may be sizes or indices, of which a part has others if anything is split.
    """
    is_split = bool(states.mesh.long_axes)
    pairs = [pair for pair in _other_arguments(call) if not (is_split and all(map(_is_size, pair)))]
    return ", ".join(given for given, _ in pairs), ", ".join(wanted for _, wanted in pairs)


def counts_of_part(*calls: Call) -> str:
    """Say which numbers ranks give calls in place of which: `arange gets 3 for 5 and div gets 2 for 4`."""
    pairs_of = {call: list(_other_arguments(call)) for call in calls}
    return " and ".join(
        f"{call.first.function} gets {', '.join(map(' for '.join, pairs))}" for call, pairs in pairs_of.items() if pairs
    )


def is_of_sizes(call: Call) -> bool:
    """Whether both sides multiply by different numbers that are small ratios, or roots of such, as no norm is."""
    different = [number for pair in _other_arguments(call) for number in pair]
    with suppress(ValueError, OverflowError):
        squares = [float(number) ** 2 for number in different]
        return bool(squares) and all(
            math.isclose(square, Fraction(square).limit_denominator(MAX_RATIO), rel_tol=EXACT) for square in squares
        )
    return False


def is_of_axis(number: float, wanted: float, mesh: Mesh) -> bool:
    """Whether a number is another one times an axis's size or its root: it may be made of the size of a part."""
    small, large = sorted((abs(number), abs(wanted)))
    ratio = large / small if small else 0.0
    sizes = [mesh.axis_size(axis) for axis in mesh.long_axes]
    return any(math.isclose(power, size, rel_tol=SINGLE) for size in sizes for power in (ratio, ratio**2))


def generator_of(states: States, call: Call) -> str:
    """Say what ranks draw random numbers from, if they draw as many as the unsharded model; else nothing."""
    whole = states.whole(call.whole.outputs[0]) if call.whole is not None and call.whole.outputs else None
    held = states.held(call.outputs[0]) if call.outputs and call.first.function in DRAWS else {}
    if whole is None or not held or any(drawn.shape != whole.shape for drawn in held.values()):
        return ""
    are_equal = all((drawn == next(iter(held.values()))).all() for drawn in held.values())
    return "a generator in another state" if are_equal else "a seed or generator of each rank's own"


def _other_arguments(call: Call) -> Iterator[tuple[str, str]]:
    """Yield the arguments that all ranks give a call and the unsharded model does not, with the unsharded model's."""
    if call.whole is None or call.counts_by_rank:
        return
    given, wanted = call.first.numbers.split(), call.whole.numbers.split()
    if len(given) == len(wanted):
        yield from (pair for pair in zip(given, wanted, strict=True) if pair[0] != pair[1])


def _is_size(word: str) -> bool:
    """Whether an argument may be a size or an index: a whole number."""
    return word.lstrip("-").isdecimal()
