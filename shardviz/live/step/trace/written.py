"""Write down what was judged of a step: a record of every point, and the values of some that are odd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from shardviz.dump.arrays.sketch import apart, sketch
from shardviz.dump.records.step import of_replay
from shardviz.dump.records.trace import PointRecord, SketchRecord, of_point
from shardviz.layout.candidates import placements_of
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.live.capture.locals import Local
from shardviz.live.capture.stamp import dtype_name
from shardviz.live.step.trace.fitting import numpy_of, part_of
from shardviz.live.step.trace.replayed import replayed
from shardviz.relate.factors import whole_multiple
from shardviz.relate.tolerance import FEW

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from shardviz.live.capture.capture import Capture
    from shardviz.live.step.trace.joined import Place
    from shardviz.live.step.trace.judged import Judged
    from shardviz.live.step.unsharded.step import UnshardedStep


def add_trace(capture: Capture, judged: Judged) -> None:
    """Record what a rank has at every point of a step; rank 0 also the unsharded model's values of odd points."""
    capture.trace += _records(judged)
    for place, values, shape in judged.values_of_odd():
        name = of_point(place.module, place.what, place.call, place.tensor)
        capture.add_values(Local(name, "activation", shape, values), "step")
    for place, whole in judged.wholes_of_odd() if capture.rank == 0 else ():
        name = of_point(place.module, place.what, place.call, place.tensor)
        capture.add_values(Local(name, "activation", tuple(whole.shape), whole), "reference")


def _records(judged: Judged) -> Iterator[PointRecord]:
    """Yield what a rank has at every place of the unsharded model's values."""
    added = {place: added_at(judged, place) for place in judged.odd if place in judged.points}
    for place in judged.places:
        yield PointRecord(
            place.module,
            place.what,
            judged.order(place),
            judged.state(place),
            place.call,
            place.tensor,
            judged.points[place].tensor,
            _layout_text(judged, place),
            judged.reference.types.get(place.module, ""),
            judged.near(place) if judged.moved is not None else 0.0,
            judged.scale(place, judged.rank),
            *added.get(place, ("", 0)),
        )


def _layout_text(judged: Judged, place: Place) -> str:
    """Return how ranks share a place, in the notation; empty if that is not known."""
    whole, placements = judged.reference.points[place].values, judged.layouts.get(place)
    if whole is None or placements is None or judged.points[place].values is None:
        return ""
    return write(Layout.from_placements(judged.mesh, tuple(whole.shape), placements))


def add_replayed(capture: Capture, judged: Judged, reference: UnshardedStep) -> None:
    """Record, of a step in narrow numbers, the gradients that the sharded modules' own activations make.

    Every rank calls this; rank 0 writes.
    """
    for name, gradient in replayed(judged, reference) if judged.moved is not None else ():
        if capture.rank == 0:
            local = Local(of_replay(name), "activation", tuple(gradient.shape), gradient.float())
            capture.add_values(local, "reference")


def add_sketches(capture: Capture, reference: UnshardedStep, drawn: Collection[str]) -> None:
    """Record the unsharded model's weights and points in few numbers.

    Args:
        capture: Rank 0's.
        reference: The unsharded model's step.
        drawn: The weights that were drawn after sharding.
    """
    for local in reference.before:
        if local.role == "param" and local.values.is_floating_point():
            numbers = sketch(numpy_of(local.values))
            record = SketchRecord(local.name, "weight", dtype_name(local.values.dtype), local.shape, numbers)
            capture.sketches.append(structs.replace(record, is_drawn=local.name in drawn))
    capture.sketches += _points(reference)


def _points(reference: UnshardedStep) -> Iterator[SketchRecord]:
    moved = reference.moved.points.points if reference.moved is not None else {}
    for place, point in reference.points.points.items():
        if point.values is None:
            continue
        numbers, dtype = sketch(numpy_of(point.values)), dtype_name(point.values.dtype)
        order = reference.points.order.get((place.module, place.call), 0)
        other = moved[place].values if place in moved else None
        noise = apart(numbers, sketch(numpy_of(other))) if other is not None else 0.0
        noise = noise if noise < float("inf") else 0.0
        shape = tuple(point.values.shape)
        yield SketchRecord(place.module, place.what, dtype, shape, numbers, order, place.call, place.tensor, noise)


def added_at(judged: Judged, place: Place) -> tuple[str, int]:
    """Return the term that a value has too often, and how often (-1: it lacks it); empty if there is none.

    What a module returns is often a sum, of what it was given and what modules in it return, and the gradient of an
    input is one of what the module sends back and what goes around it, as a residual does.

    Args:
        judged: The step.
        place: An output's, or that of an input's gradient. What the module was given goes by the name `input`.
    """
    values, whole = judged.points[place].values, judged.reference.points[place].values
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
    for other, point in judged.points.items():
        is_input = other == place._replace(what="input", tensor=other.tensor)
        is_inner = other.what == "output" and other.module.startswith(prefix) and other.module != place.module
        is_term = is_input or (is_inner and judged.state(other) == "right")
        if is_term and point.values is not None and point.values.shape == values.shape:
            yield "input" if is_input else other.module, point.values


def _terms_around(judged: Judged, place: Place, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what flows around a module: what comes back to the modules beside it, and to the one that they are in."""
    parent = place.module.rpartition(".")[0]
    for other, point in judged.points.items():
        is_beside = other.module.rpartition(".")[0] == parent and other.module != place.module
        is_near = other.what == "gradient of output" and (is_beside or other.module == parent)
        is_term = is_near and bool(parent) and judged.state(other) == "right"
        if is_term and point.values is not None and point.values.shape == values.shape:
            yield other.module, point.values
