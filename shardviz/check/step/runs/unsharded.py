"""The unsharded models of two runs: do they start from the same weights, and where do their steps first part?

Both are right by themselves. Where they part, another torch, another dtype or another program is why, and whatever
comes after is a consequence. Runs that start from other weights cannot be compared beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.trace.calls import is_within
from shardviz.dump.arrays.sketch import apart
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import COARSEST_NORM, MOST_SKETCH_NOISE, NORM, SKETCH_NOISE, above_noise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.trace import SketchRecord, What

Direction = Literal["forward", "backward"]
Place = tuple[str, str, int, int]
"""A name, what of it, the number of the call, and of the tensor."""


@dataclass(frozen=True)
class Pair:
    """A place that both runs' unsharded models have.

    Attributes:
        ours: The first run's.
        theirs: The second run's.
    """

    ours: SketchRecord
    theirs: SketchRecord

    @cached_property
    def allowed(self) -> float:
        """How far the two may be apart."""
        sides = self.ours, self.theirs
        base = max(NORM.get(one.dtype, COARSEST_NORM) for one in sides)
        noise = max(one.noise for one in sides)
        return above_noise(noise, min(base, NORM["float32"]) if noise else base, times=SKETCH_NOISE)

    @cached_property
    def apart(self) -> float:
        """How far the two are apart, relative to the larger; infinite if shapes differ."""
        if self.ours.shape != self.theirs.shape:
            return float("inf")
        return apart(self.ours.numbers, self.theirs.numbers)

    @property
    def is_telling(self) -> bool:
        """Whether rounding alone does less than all that is there."""
        return self.allowed <= MOST_SKETCH_NOISE

    @property
    def differs(self) -> bool:
        """Whether the two are apart by more than rounding."""
        return self.is_telling and self.apart > self.allowed

    @property
    def factor(self) -> float | None:
        """The number by which the second's values are the first's; None if there is none."""
        ours, theirs = np.array(self.ours.numbers), np.array(self.theirs.numbers)
        found = factor_of(theirs, ours) if ours.shape == theirs.shape else None
        is_times = bool(found) and np.linalg.norm(theirs - ours * found) <= self.allowed * np.linalg.norm(theirs)
        return found if is_times else None


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two unsharded models first part.

    Attributes:
        direction: In forward or in backward.
        module: The module; empty for the model itself.
        what: Which side of it is the first that differs.
        pair: What both have there.
        following: How many modules' calls after it differ too.
    """

    direction: Direction
    module: str
    what: str
    pair: Pair
    following: int


def pairs_of(before: Dump, after: Dump) -> dict[Place, Pair]:
    """Return the weights and points that both runs' unsharded models have, in the first one's order."""
    ours, theirs = _by_place(before), _by_place(after)
    return {place: Pair(one, theirs[place]) for place, one in ours.items() if place in theirs}


def has_sketches(dump: Dump) -> bool:
    """Whether a dump says what its unsharded model has."""
    return bool(dump.files.ranks[0].sketches) if 0 in dump.files.ranks else False


def _by_place(dump: Dump) -> Mapping[Place, SketchRecord]:
    records = dump.files.ranks[0].sketches if 0 in dump.files.ranks else ()
    return {(one.name, one.what, one.call, one.index): one for one in records}


def first_parting(pairs: Mapping[Place, Pair]) -> Parting | None:
    """Return where the unsharded models' steps first part; None if they do not."""
    calls = _calls(pairs)
    forward = _first(calls, ("input", "output"), "forward")
    if forward is not None:
        return forward
    return _first(list(reversed(calls)), ("gradient of output", "gradient of input"), "backward")


Call = tuple[str, dict[str, list[Pair]]]


def _calls(pairs: Mapping[Place, Pair]) -> list[Call]:
    """Return the calls of modules as they ended in the first run, each with its sides."""
    sides_by_call: dict[tuple[int, str, int], dict[str, list[Pair]]] = {}
    for (name, what, call, _), pair in pairs.items():
        if what != "weight":
            sides_by_call.setdefault((pair.ours.order, name, call), {}).setdefault(what, []).append(pair)
    return [(name, sides) for (_, name, _), sides in sorted(sides_by_call.items(), key=lambda item: item[0])]


def _first(calls: Sequence[Call], sides: tuple[What, What], direction: Direction) -> Parting | None:
    """Return the first call that is given the same and returns something else; else the first that is given it."""
    given, returned = sides
    differing = [at for at, (_, own) in enumerate(calls) if any(_differing(own, side) for side in sides)]
    if not differing:
        return None
    origins = [at for at in differing if not _differing(calls[at][1], given)]
    if direction == "backward":
        at = _innermost(calls, origins) if origins else differing[0]
    else:
        earlier = [
            at for at in differing if origins and at < origins[0] and not is_within(calls[at][0], calls[origins[0]][0])
        ]
        at = origins[0] if origins and not earlier else differing[0]
    name, sides_of = calls[at]
    what = returned if at in origins else given
    return Parting(direction, name, what, _differing(sides_of, what)[0], len(differing) - 1)


def _innermost(calls: Sequence[Call], candidates: Sequence[int]) -> int:
    """Return the innermost of the calls that lie within the first one that goes wrong in backward."""
    outer = candidates[0]
    within = [at for at in candidates if is_within(calls[at][0], calls[outer][0])]
    return _innermost(calls, within) if within else outer


def _differing(sides: Mapping[str, list[Pair]], what: str) -> list[Pair]:
    return [pair for pair in sides.get(what, ()) if pair.differs]
