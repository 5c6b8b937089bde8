"""A wrong value of a job that is the other job's with a term of it too often, or left out.

As `live/step/trace/added` finds it in a probe's step: an output is a sum of what the module was given and of what
modules in it return, the gradient of an input one of what the module sends back and of what flows around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.jobs.values import in_both
from shardviz.check.step.trace.calls import is_within
from shardviz.layout.candidates import placements_of
from shardviz.relate.factors import whole_multiple
from shardviz.relate.tolerance import FEW

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.step.jobs.judging import Judging
    from shardviz.check.step.jobs.traces import Place


def added_at(judging: Judging, place: Place, rank: int) -> tuple[str, int]:
    """Return the term that a value has too often, and how often (-1: it lacks it); empty if there is none."""
    whole, part = judging.whole[place].values, judging.ranks[rank][place].values
    if whole is None or part is None or not (whole.is_whole and part.is_whole) or part.values.size < FEW:
        return "", 0
    terms = list(_terms(judging, place, rank, part.shape))
    for _, region in placements_of(whole.shape, part.shape, judging.mesh, rank) if terms else ():
        pair = in_both(whole, part, region)
        excess = pair[1] - pair[0] * judging.scale(place, rank) if pair is not None else None
        for name, term in terms:
            times = whole_multiple(excess, term, judging.judgments[place].near) if excess is not None else 0
            if times:
                return name, times
    return "", 0


def _terms(
    judging: Judging, place: Place, rank: int, shape: tuple[int, ...]
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    for other, point in judging.ranks[rank].items():
        name = _name_of_term(place, other)
        judgment = judging.judgments.get(other)
        is_right = name == "input" or (judgment is not None and judgment.state.get(rank) == "right")
        if name and is_right and point.values is not None and point.values.is_whole and point.values.shape == shape:
            yield name, point.values.values


def _name_of_term(place: Place, other: Place) -> str:
    """Return the name of a term of a sum; empty if the value at `other` is not a term of that at `place`."""
    if place.what == "output" and other.what == "input" and (other.module, other.call) == (place.module, place.call):
        return "input"
    if place.what == "output":
        return other.module if other.what == "output" and is_within(other.module, place.module) else ""
    parent = place.module.rpartition(".")[0]
    is_beside = other.module.rpartition(".")[0] == parent and other.module != place.module
    is_around = bool(parent) and other.what == "gradient of output" and (is_beside or other.module == parent)
    return other.module if place.what == "gradient of input" and is_around else ""
