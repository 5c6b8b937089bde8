"""Numbers, indices and copies that differ, as findings of a step say them."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from shardviz.explain.templates import number as number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardviz.explain.finding import Finding


def apart_text(low: int, high: int, worst: float) -> str:
    """Return the clause that says how far the copies of two ranks are apart."""
    if math.isinf(worst):
        return f"one of rank {low} and rank {high} has NaN or infinity, and the other has a different value"
    return f"rank {low} and rank {high} differ by up to {number(worst)}"


MAX_SPANS = 4


def spans(places: Iterable[int]) -> str:
    """Name indices in their order as ranges: `0:6+18:24`."""
    runs = [
        [at for _, at in run] for _, run in groupby(enumerate(map(int, places)), key=lambda pair: pair[1] - pair[0])
    ]
    named = [f"{run[0]}:{run[-1] + 1}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return "+".join(named[:MAX_SPANS]) + ("+..." if len(named) > MAX_SPANS else "")


def kind_of(finding: Finding) -> str:
    """Return the kind of a finding, with its tensor: `wrong-scale: layers.0.up.weight`."""
    return f"{finding.kind}: {finding.tensor}" if finding.tensor else finding.kind
