"""What each micro-batch adds to the gradients of linear layers: of what a layer is given, and what comes back to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.dump.records.trace import Place
from shardviz.groups import the_only
from shardviz.relate.tolerance import STEP
from shardviz.relate.values import farthest, magnitude

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.trace.judging import Judging
    from shardviz.check.step.trace.traces import JobTrace, Point, Weight

    Values = NDArray[np.float64]


def terms_of_micro_batches(
    job: JobTrace, judging: Judging, gradients: Mapping[str, Weight]
) -> Iterator[tuple[str, list[Values]]]:
    """Yield each gradient of a linear layer with its terms, one for a micro-batch of all ranks together.

    Ranks have equal micro-batches, several of them, and the terms add up to the gradient.

    Args:
        gradients: The other job's, whole.
    """
    count = the_only({of_rank.counts.get("", 1) for of_rank in job.ranks.values()}) or 1
    modules = {name.rpartition(".")[0] for name in gradients if name.endswith(".weight")}
    for module in sorted(modules) if count > 1 else ():
        places = [Place(module, 0, what, 0) for what in ("input", "gradient of output")]
        sides = [[_rows(points.get(place), count) for place in places] for points in judging.ranks.values()]
        weight = gradients[f"{module}.weight"]
        if not all(all(parts) for parts in sides) or not all(_fit(weight, *parts) for parts in sides):
            continue
        terms = {
            "weight": [sum((back[at].T @ given[at] for given, back in sides), np.zeros(())) for at in range(count)],
            "bias": [sum((back[at].sum(axis=0) for _, back in sides), np.zeros(())) for at in range(count)],
        }
        for name, of_batches in terms.items():
            scaled = _adding_up(of_batches, gradients.get(f"{module}.{name}"))
            if scaled:
                yield f"{module}.{name}", scaled


def _fit(weight: Weight, given: Sequence[Values], back: Sequence[Values]) -> bool:
    """Whether a rank has the whole layer, and as many rows of what it is given as of what comes back to it."""
    return all(
        len(rows) == len(rows_back) and (rows_back.shape[1], rows.shape[1]) == weight.shape
        for rows, rows_back in zip(given, back, strict=True)
    )


def _rows(point: Point | None, count: int) -> list[Values]:
    """Return the rows of each micro-batch at a linear layer; nothing of other modules, or if some were not kept."""
    values = point.values if point is not None and point.type == "Linear" and not point.dim else None
    if values is None or not values.is_whole or len(values.shape) < 2 or values.shape[0] % count:
        return []
    return [part.reshape(-1, values.shape[-1]) for part in np.split(values.values, count)]


def _adding_up(terms: Sequence[Values], gradient: Weight | None) -> list[Values]:
    """Return terms times the number with which they add up to a gradient; none if there is no such number."""
    values = gradient.values if gradient is not None else None
    whole = sum(terms[1:], terms[0])
    if values is None or not values.is_whole or whole.shape != values.shape:
        return []
    scale = float(np.vdot(whole, values.values) / (np.vdot(whole, whole) or 1.0))
    is_whole = farthest(scale * whole, values.values) <= STEP * magnitude(values.values)
    return [scale * term for term in terms] if is_whole else []
