"""Indices of slices in words."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SPANS = 4


def spans(places: Iterable[int]) -> str:
    """Name indices in their order as ranges: `0:6+18:24`."""
    runs = [
        [at for _, at in run] for _, run in groupby(enumerate(map(int, places)), key=lambda pair: pair[1] - pair[0])
    ]
    named = [f"{run[0]}:{run[-1] + 1}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return "+".join(named[:MAX_SPANS]) + ("+..." if len(named) > MAX_SPANS else "")
