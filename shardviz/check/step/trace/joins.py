"""How a module joins what ranks along an axis have of a sequence, judged by which ranks' results are right.

In a causal module the first rank needs no other one, and the second only the first. So if the second is right, a rank's
own part is not all that the module reads; and if only later ones are wrong, what comes from farther away is joined
wrongly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.explain.step.joins import JoinedFromAfar, WrongDenominator
from shardviz.explain.step.modules import UngatheredInput
from shardviz.relate.factors import factors_of_rows
from shardviz.relate.tolerance import EXACT, FEW, LEAST_STATISTIC
from shardviz.text import join_numbers, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from shardviz.check.step.comparison import Compared
    from shardviz.dump.records.trace import FrameRecord, LinesRecord
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh

LEAST_ROWS = 8
"""So many rows with a number of their own tell that a denominator is wrong."""

MAX_LISTED = 4
"""So many lines that join parts are listed."""


def nearest_comparison(comparisons: Iterable[Compared]) -> Compared | None:
    """Return the comparison in which the most ranks are right; None if there is none in which some are wrong."""
    wrong = [comparison for comparison in comparisons if not comparison.incomparable and comparison.wrong]
    return min(wrong, key=lambda comparison: len(comparison.wrong), default=None)


def wrong_coordinates(comparison: Compared, axis: str) -> tuple[int, ...] | None:
    """Return the coordinates along an axis whose ranks are wrong; None if groups of ranks don't agree on them."""
    groups = comparison.mesh.groups(axis)
    patterns = {tuple(at for at, rank in enumerate(group) if rank in comparison.wrong) for group in groups}
    is_whole = all(rank in comparison.reduced for group in groups for rank in group)
    return patterns.pop() if is_whole and len(patterns) == 1 else None


def check_joined(comparison: Compared, module: str, axis: str) -> Cause | None:
    """Return the cause if ranks join what is near and not what is far, or divide rows by something else."""
    if (denominator := _of_denominator(comparison, module)) is not None:
        return denominator
    size, wrong = comparison.mesh.axis_size(axis), wrong_coordinates(comparison, axis) or ()
    right = [at for at in range(size) if at not in wrong]
    if len(right) < 2 or not wrong or wrong != tuple(range(wrong[0], wrong[-1] + 1)):
        return None
    sides = {(0, len(right) - 1): "before", (len(wrong), size - 1): "after"}
    side = sides.get((right[0], right[-1]))
    if side is None:
        return None
    spans = join_numbers(right), join_numbers(wrong)
    return JoinedFromAfar(module, axis, *spans, side, near=len(right) - 1, num_wrong=len(wrong))


def is_own_part_possible(comparison: Compared, axis: str) -> bool:
    """Whether a module may read each rank's own part alone: then at most the first rank is right, or the last."""
    size, wrong = comparison.mesh.axis_size(axis), wrong_coordinates(comparison, axis)
    return wrong is None or {*range(size)} - {*wrong} in ({0}, {size - 1}, set())


def _of_denominator(comparison: Compared, module: str) -> WrongDenominator | None:
    """Return the cause if neighboring features of each wrong row are the unsharded model's times one number."""
    pairs = [(comparison.reduced[rank], comparison.wanted_of(rank)) for rank in comparison.wrong]
    features = comparison.wanted.shape[-1] if comparison.wanted.ndim > 1 else 0
    near = max(EXACT, comparison.tolerance / (float(np.max(np.abs(comparison.wanted), initial=0.0)) or 1.0))
    for size in (size for size in range(features, FEW - 1, -1) if features % size == 0):
        factors = [_factors(held, wanted, size, near) for held, wanted in pairs]
        known = np.concatenate([one for one in factors if one is not None] or [np.ones(0)])
        off = known[np.abs(known - 1) > LEAST_STATISTIC]
        is_of_rows = (
            all(one is not None for one in factors) and len(off) >= LEAST_ROWS and np.ptp(off) > LEAST_STATISTIC
        )
        if is_of_rows and (np.all(off < 1) or np.all(off > 1)):
            return WrongDenominator(module, size, bool(np.all(off < 1)), size == features, comparison.wrong)
    return None


def _factors(
    held: NDArray[np.float64], wanted: NDArray[np.float64], size: int, near: float
) -> NDArray[np.float64] | None:
    """Return by what each stretch of neighboring features is multiplied; None if one is not by one number."""
    if held.shape != wanted.shape:
        return None
    held, wanted = held.reshape(-1, size), wanted.reshape(-1, size)
    factors = factors_of_rows(held, wanted)
    if factors is None or not np.all(factors > 0):
        return None
    is_alike = bool(np.all(np.abs(held - factors * wanted) <= near * np.abs(wanted).max(initial=0.0)))
    return factors[:, 0] if is_alike else None


def with_lines_of_joins(finding: Finding, sharded: Mapping[int, LinesRecord], mesh: Mesh) -> Finding:
    """Return a finding about a wrong join with the lines that run once for each rank whose part is joined."""
    cause = finding.explanation
    if not isinstance(cause, UngatheredInput | JoinedFromAfar | WrongDenominator) or finding.line:
        return finding
    if isinstance(cause, UngatheredInput) and not cause.exchange:
        return finding
    sides = [(axis, side) for axis in mesh.long_axes for side in ("before", "after")]
    found = [(*at, lines) for at in sides if (lines := _lines_of_joins(sharded, mesh, *at))]
    if len(found) != 1:
        return finding
    axis, side, lines = found[0]
    place = listed((line.place for line in lines), MAX_LISTED)
    shown = listed((f"{line.place} `{line.source}`" for line in lines), MAX_LISTED)
    runs = f"{shown} {'runs' if len(lines) == 1 else 'run'} once for each rank {side} along {axis}"
    placed = replace(finding, details=(*finding.details, runs), line=lines[0].place)
    return placed.because(replace(cause, place=place))


def _lines_of_joins(sharded: Mapping[int, LinesRecord], mesh: Mesh, axis: str, side: str) -> list[FrameRecord]:
    """Return the lines of a module, in one file, that a rank runs as often as there are ranks on one side of it."""
    frames = {line.frames[line.innermost] for own in sharded.values() for line in own.lines}
    by_rank = {rank: Counter(line.frames[line.innermost] for line in own.lines) for rank, own in sharded.items()}
    groups = [[by_rank[rank] for rank in group] for group in mesh.groups(axis) if by_rank.keys() >= {*group}]
    order = 1 if side == "before" else -1

    def is_of_join(frame: FrameRecord) -> bool:
        runs = [[counts[frame] for counts in group[::order]] for group in groups]
        return all(of[-1] and all(count * (len(of) - 1) == of[-1] * at for at, count in enumerate(of)) for of in runs)

    of_joins = filter(is_of_join, frames if groups else ())
    lines = sorted(of_joins, key=lambda frame: (frame.file, frame.line))
    return lines if len({frame.file for frame in lines}) == 1 else []
