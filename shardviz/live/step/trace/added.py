"""A wrong value that is the unsharded model's with a term of it too often, or left out.

What a module returns is often a sum: of what it was given and what modules in it return. Where each rank adds one of
these before ranks are summed, or one is left out, the difference is that one times a whole number. The gradient of an
input is a sum, too: of what the module sends back, and of what goes around it, as a residual does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.layout.candidates import placements_of
from shardviz.live.step.trace.fitting import numpy_of, part_of
from shardviz.relate.factors import whole_multiple
from shardviz.relate.tolerance import FEW

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardviz.live.step.trace.joined import Place
    from shardviz.live.step.trace.judged import Judged


def added_at(judged: Judged, place: Place) -> tuple[str, int]:
    """Return the term that a value has too often, and how often (-1: it lacks it); empty where there is none.

    Args:
        judged: The step.
        place: An output's, or that of an input's gradient. What the module was given goes by the name `input`.
    """
    values, whole = judged.own[place].values, judged.reference.points[place].values
    terms = {"output": _terms, "gradient of input": _terms_around}.get(place.what)
    if terms is None or values is None or whole is None or values.numel() < FEW:
        return "", 0
    near = judged.near(place)
    for _, region in placements_of(tuple(whole.shape), tuple(values.shape), judged.mesh, judged.rank):
        excess = numpy_of(values.to(whole.dtype) - part_of(whole, region) * judged.scale(place, judged.rank))
        for name, term in terms(judged, place, values):
            times = whole_multiple(excess, numpy_of(term), near)
            if times:
                return name, times
    return "", 0


def _terms(judged: Judged, place: Place, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what may have been added: what the call was given, and what modules within it returned to it."""
    prefix = f"{place.module}." if place.module else ""
    for other, point in judged.own.items():
        is_input = other == place._replace(what="input", tensor=other.tensor)
        is_inner = other.what == "output" and other.module.startswith(prefix) and other.module != place.module
        is_term = is_input or (is_inner and judged.state(other) == "right")
        if is_term and point.values is not None and point.values.shape == values.shape:
            yield "input" if is_input else other.module, point.values


def _terms_around(judged: Judged, place: Place, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what flows around a module: what comes back to the modules beside it, and to the one that they are in."""
    parent = place.module.rpartition(".")[0]
    for other, point in judged.own.items():
        is_beside = other.module.rpartition(".")[0] == parent and other.module != place.module
        is_near = other.what == "gradient of output" and (is_beside or other.module == parent)
        is_term = is_near and bool(parent) and judged.state(other) == "right"
        if is_term and point.values is not None and point.values.shape == values.shape:
            yield other.module, point.values
