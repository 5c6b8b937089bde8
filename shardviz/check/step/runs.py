"""Two runs' steps compared, in sentences: the unsharded models, then each sharded one.

Both unsharded models are right by themselves. If they do not start from the same weights, they cannot be compared
beyond that. Where their steps first part, another torch, another dtype or another program is why, and whatever comes
after is a consequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.ranks import without_trace
from shardviz.check.report import NotChecked, Report
from shardviz.check.step.departure import Departure, Kind, StepDifference, departure_for
from shardviz.check.step.jobs.compare import compare_jobs
from shardviz.check.step.trace.calls import is_within
from shardviz.dump.arrays import apart
from shardviz.explain.step.batches import DifferentBatch
from shardviz.explain.step.two_jobs import DifferentWeights
from shardviz.explain.step.whole_step import DifferentProgram, WeightsDrawnAfterSharding
from shardviz.explain.templates import number
from shardviz.relate.factors import factor_of
from shardviz.relate.tolerance import COARSEST_NORM, MOST_SKETCH_NOISE, NORM, SKETCH_NOISE, above_noise
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.dump.dump import Dump
    from shardviz.dump.records.trace import SketchRecord, What
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

ODD = ("odd", "repeated", "cut", "none")


def compare_steps(before: Dump, after: Dump, reports: tuple[Report, Report]) -> StepDifference:
    """Compare the steps of two runs; nothing if neither followed its step through its modules."""
    of_jobs = compare_jobs(before, after)
    if of_jobs is not None:
        return of_jobs
    has = [bool(_sketches(dump)) for dump in (before, after)]
    if not all(has):
        which, dump = ("the second", after) if has[0] else ("the first", before)
        why = f"the step, module by module: {without_trace(dump, which)}"
        return StepDifference(not_compared=(NotChecked("", why, "step"),)) if any(has) else StepDifference()
    pairs = pairs_of(before, after)
    weights = {place: pair for place, pair in pairs.items() if place[1] == "weight"}
    points = {place: pair for place, pair in pairs.items() if place[1] != "weight"}
    begun = _of_weights(weights) + _of_batch(points)
    parting = None if begun else first_parting(points)
    unsharded = begun or ([parting] if parting is not None else [])
    agree = {place: pair for place, pair in (weights if unsharded else pairs).items() if not pair.differs}
    nearest = max(agree.values(), key=lambda pair: pair.apart / pair.allowed if pair.is_telling else 0.0, default=None)
    both = [sorted({getattr(pair, side).dtype for pair in points.values()}) for side in ("ours", "theirs")]
    return StepDifference(
        (*unsharded, *_of_sharded(before, after, reports)),
        len(agree),
        nearest.apart if nearest is not None else 0.0,
        nearest.allowed if nearest is not None else 0.0,
        tuple(dict.fromkeys(dtype for dtypes in both for dtype in dtypes)),
        tuple(_not_compared(points, begun)),
    )


def _not_compared(points: Mapping[Place, Pair], begun: Sequence[Departure]) -> list[NotChecked]:
    lost = [place for place, pair in points.items() if not pair.is_telling]
    if not points and not begun:
        why = "the step, module by module: a dump has no trace of one (--trace off)"
    elif points and begun:
        what = "weights" if begun[0].kind != "batch" else "rows"
        why = f"{counted(len(points), 'point')} of the unsharded models' steps: they start from different {what}"
    elif lost:
        why = f"{len(lost)} of {counted(len(points), 'point')} of the step: rounding alone moves them by more than 5 %"
    else:
        return []
    return [NotChecked("", why, "step")]


def _of_weights(weights: Mapping[Place, Pair]) -> list[Departure]:
    """Return that the runs start from different weights; those drawn after sharding are reported separately."""
    departures = []
    kinds: tuple[tuple[Kind, Cause], ...] = (("weights", DifferentWeights()), ("drawn", WeightsDrawnAfterSharding()))
    for kind, cause in kinds:
        differ = {name: pair for (name, *_), pair in weights.items() if pair.differs and pair.kind == kind}
        if differ:
            name, pair = next(iter(differ.items()))
            count = f"{len(differ):,} of {len(weights):,} weights differ before the step"
            departures.append(departure_for(cause, kind, name, f"{count}: {listed(differ)}; {_apart(pair)}"))
    return departures


def _of_batch(points: Mapping[Place, Pair]) -> list[Departure]:
    """Return that the models are given other rows."""
    pairs = [pair for (name, what, _, _), pair in points.items() if not name and what == "input" and pair.differs]
    if not pairs:
        return []
    sentence = f"the model's inputs differ: {_apart(pairs[0])}"
    return [departure_for(DifferentBatch(), "batch", "", sentence, direction="forward")]


def _apart(pair: Pair) -> str:
    if pair.ours.shape != pair.theirs.shape:
        return f"{list(pair.ours.shape)} in the first run, {list(pair.theirs.shape)} in the second"
    if not pair.ours.numbers or not pair.theirs.numbers:
        return f"the {'first' if not pair.ours.numbers else 'second'} run's has NaN or infinite elements"
    times = pair.factor
    if times is not None and abs(times - 1) > pair.allowed:
        return f"the second run's is {number(times)} times the first's"
    return f"off by {pair.apart:.2g} of its norm (rounding allows {pair.allowed:.2g})"


def _of_parting(module: str, what: str, pair: Pair, direction: Direction, following: int) -> Departure:
    """Return that a side of a module is the first that differs, before so many other calls."""
    name = module or "the model itself"
    dtypes = sorted({pair.ours.dtype, pair.theirs.dtype})
    how = _apart(pair) + (f" ({' and '.join(dtypes)})" if len(dtypes) > 1 else "")
    of_equal = {"output": "its inputs are equal", "gradient of input": "the gradients of its output are equal"}
    equal = f", although {of_equal[what]}" if what in of_equal else ""
    sentence = f"{name} is the first module whose {what} differs{equal}: {how}"
    return departure_for(DifferentProgram(), "unsharded", module, sentence, direction=direction, following=following)


def _of_sharded(before: Dump, after: Dump, reports: tuple[Report, Report]) -> list[Departure]:
    """Return the first wrong module of one run's sharded step if the other run is right there."""
    first_findings = [next((finding for finding in report.findings if finding.module), None) for report in reports]
    first, second = first_findings
    if first is not None and second is not None and first.module == second.module:
        return [_departure(first, f"in both runs: {first.summary}", before)]
    return [
        _departure(finding, f"only in the {run} run, on {dump.files.mesh}: {finding.summary}", dump)
        for run, finding, dump in zip(("first", "second"), first_findings, (before, after), strict=True)
        if finding is not None
    ]


def _departure(finding: Finding, sentence: str, dump: Dump) -> Departure:
    odd = {
        (record.module, record.call) for own in dump.files.ranks.values() for record in own.trace if record.state in ODD
    }
    following = max(len(odd), 1) - 1
    return Departure("sharded", finding.module, "", sentence, finding.cause, following, finding.explanation)


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
        base = max(NORM.get(side.dtype, COARSEST_NORM) for side in sides)
        noise = max(side.noise for side in sides)
        return above_noise(noise, min(base, NORM["float32"]) if noise else base, times=SKETCH_NOISE)

    @cached_property
    def apart(self) -> float:
        """How far the two are apart, relative to the larger; infinite if shapes differ."""
        if self.ours.shape != self.theirs.shape:
            return float("inf")
        return apart(self.ours.numbers, self.theirs.numbers)

    @property
    def kind(self) -> Kind:
        """What it is called if it is a weight that differs."""
        return "drawn" if self.ours.is_drawn or self.theirs.is_drawn else "weights"

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
        factor = factor_of(theirs, ours) if ours.shape == theirs.shape else None
        left = np.linalg.norm(theirs - ours * factor) if factor else np.inf
        return factor if left <= self.allowed * np.linalg.norm(theirs) else None


def pairs_of(before: Dump, after: Dump) -> dict[Place, Pair]:
    """Return the weights and points that both runs' unsharded models have, in the first one's order."""
    ours, theirs = _by_place(before), _by_place(after)
    return {place: Pair(sketch, theirs[place]) for place, sketch in ours.items() if place in theirs}


def _sketches(dump: Dump) -> Sequence[SketchRecord]:
    """Return what a dump says that its unsharded model has."""
    return dump.files.ranks[0].sketches if 0 in dump.files.ranks else ()


def _by_place(dump: Dump) -> Mapping[Place, SketchRecord]:
    return {(record.name, record.what, record.call, record.index): record for record in _sketches(dump)}


def first_parting(pairs: Mapping[Place, Pair]) -> Departure | None:
    """Return in what the unsharded models' steps first part; None if they do not."""
    calls = _calls(pairs)
    forward = _first_of(calls, ("input", "output"), "forward")
    if forward is not None:
        return forward
    return _first_of(list(reversed(calls)), ("gradient of output", "gradient of input"), "backward")


Call = tuple[str, dict[str, list[Pair]]]


def _calls(pairs: Mapping[Place, Pair]) -> list[Call]:
    """Return the calls of modules as they ended in the first run, each with its sides."""
    sides_by_call: dict[tuple[int, str, int], dict[str, list[Pair]]] = {}
    for (name, what, call, _), pair in pairs.items():
        sides_by_call.setdefault((pair.ours.order, name, call), {}).setdefault(what, []).append(pair)
    return [(name, sides) for (_, name, _), sides in sorted(sides_by_call.items(), key=lambda item: item[0])]


def _first_of(calls: Sequence[Call], sides: tuple[What, What], direction: Direction) -> Departure | None:
    """Return the difference of the first call that is given the same; if none is, of the first that is given others."""
    inputs, returned = sides
    differing = [at for at, (_, own) in enumerate(calls) if any(_differing(own, side) for side in sides)]
    if not differing:
        return None
    origins = [at for at in differing if not _differing(calls[at][1], inputs)]
    if direction == "backward":
        at = _innermost(calls, origins) if origins else differing[0]
    else:
        before = [at for at in differing if origins and at < origins[0]]
        is_first = bool(origins) and all(is_within(calls[at][0], calls[origins[0]][0]) for at in before)
        at = origins[0] if is_first else differing[0]
    name, sides_of = calls[at]
    what = returned if at in origins else inputs
    return _of_parting(name, what, _differing(sides_of, what)[0], direction, len(differing) - 1)


def _innermost(calls: Sequence[Call], candidates: Sequence[int]) -> int:
    """Return the innermost of the calls that lie within the first one that goes wrong in backward."""
    outer = candidates[0]
    within = [at for at in candidates if is_within(calls[at][0], calls[outer][0])]
    return _innermost(calls, within) if within else outer


def _differing(sides: Mapping[str, list[Pair]], what: str) -> list[Pair]:
    return [pair for pair in sides.get(what, ()) if pair.differs]
