"""Write down what was judged of a step: a record of every point, and the values of some that are odd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.dump.records import of_point
from shardviz.live.capture.locals import Local

if TYPE_CHECKING:
    from shardviz.live.capture.capture import Capture
    from shardviz.live.step.trace.judged import Judged


def add_trace(capture: Capture, judged: Judged) -> None:
    """Record what a rank has at every point of a step; rank 0 also the unsharded model's values of odd points."""
    capture.trace += judged.records()
    for place, values, shape in judged.values_of_odd():
        name = of_point(place.module, place.what, place.call, place.tensor)
        capture.add_values(Local(name, "activation", shape, values), "step")
    for place, whole in judged.wholes_of_odd() if capture.rank == 0 else ():
        name = of_point(place.module, place.what, place.call, place.tensor)
        capture.add_values(Local(name, "activation", tuple(whole.shape), whole), "reference")
