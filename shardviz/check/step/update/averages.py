"""Averages of weights, which a step keeps in buffers: of which decay they are, and of weights before or after the step.

A moving average is a share of its old values and a share of a weight's. The shares that the unsharded model's buffer
has say how it is made, whatever code makes it; a rank's buffer has shares of its own, or is what it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.comparison import Compared, Reason, laid_out, whole_of
from shardviz.explain.step.buffers import OtherAverage
from shardviz.explain.templates import number
from shardviz.relate.tolerance import MANY, SINGLE, STEP
from shardviz.relate.values import error_of
from shardviz.text import named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump

    Values = NDArray[np.float64]

MOST_UPDATES = 64
"""An average is not taken to be updated more often in a step."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What an average is made of.

    Attributes:
        kept: How much of its old values it keeps.
        taken: How much of the weight it takes.
        moment: Whether that is the weight before the step, or after it.
    """

    kept: float
    taken: float
    moment: str


def other_average(dump: Dump, comparison: Compared, ranks: Sequence[int]) -> Reason | None:
    """Return what differs in how a buffer averages a weight, if all wrong ranks have the same difference."""
    before = whole_of(dump, "buffer", comparison.name)
    for weight, (old, new) in _weights(dump, comparison.wanted.shape) if before is not None else ():
        if before is None or before.shape != comparison.wanted.shape:
            continue
        wanted = shares_of(comparison.wanted, before, {"before": old, "after": new})
        tensor = dump.find("step", "param", weight)
        if wanted is None or tensor is None:
            continue
        own = laid_out(dump, tensor, weight, new, comparison.rounding)
        causes = set()
        for rank in ranks:
            part = comparison.part(before, rank)
            if own.values.keys() != comparison.values.keys() or own.values[rank].shape != part.shape:
                return None
            sources = {"before": comparison.part(old, rank), "after": own.values[rank]}
            causes.add(_difference(wanted, comparison.reduced[rank], part, sources))
        if len(causes) == 1 and (cause := causes.pop()) is not None:
            which = f"on {named_ranks(ranks)} " if len(ranks) < len(comparison.reduced) else ""
            return Reason(cause, f"{which}the buffer is another average of {weight} than the unsharded model's")
    return None


def _weights(dump: Dump, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[Values, Values]]]:
    """Yield the unsharded model's weights of a shape, before and after the step."""
    for name, tensor in dump.by_name("updated", "param").items():
        old = whole_of(dump, "param", name) if tensor.shape == shape else None
        if old is not None and old.shape == shape:
            yield name, (old, dump.values(tensor.first, name))


def _difference(wanted: Shares, held: Values, before: Values, sources: Mapping[str, Values]) -> OtherAverage | None:
    """Return in what a rank's average differs from the wanted one; None if that is not known."""
    if error_of(held, before) <= SINGLE:
        return OtherAverage("none")
    shares = shares_of(held, before, sources)
    if shares is None:
        return None
    if not math.isclose(shares.kept, wanted.kept, rel_tol=STEP):
        times = round(math.log(shares.kept) / math.log(wanted.kept)) if 0 < min(shares.kept, wanted.kept) < 1 else 0
        if 1 < times <= MOST_UPDATES and math.isclose(shares.kept, wanted.kept**times, rel_tol=STEP):
            return OtherAverage("times", str(times))
        return OtherAverage("decay", number(shares.kept), number(wanted.kept))
    if shares.moment != wanted.moment:
        return OtherAverage("moment", shares.moment, wanted.moment)
    return None


def shares_of(values: Values, before: Values, sources: Mapping[str, Values]) -> Shares | None:
    """Return the shares of which values are made; None if they aren't, or it is not certain of which weights."""
    fits = []
    for moment, source in sources.items() if values.size >= MANY else ():
        columns = np.stack([before.ravel(), source.ravel()], axis=1)
        (kept, taken), *_ = np.linalg.lstsq(columns, values.ravel(), rcond=None)
        made = (columns @ [kept, taken]).reshape(values.shape)
        if error_of(made, values) <= SINGLE and abs(taken) > STEP:
            fits.append(Shares(float(kept), float(taken), moment))
    return fits[0] if len(fits) == 1 else None
