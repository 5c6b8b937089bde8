"""Names the difference between a tensor and its reference: a scale, a missing sum, a wrong order or a wrong value."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.finding import Finding
from shardviz.check.order.infer import infer_layout
from shardviz.check.order.infer.labels import explain_label
from shardviz.check.step.rules.gradients import check_unreduced
from shardviz.check.step.rules.scale import check_scale
from shardviz.layout.ids import region_of
from shardviz.layout.notation import write
from shardviz.layout.region import index_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Tensor
    from shardviz.layout.layout import Layout

MAX_TRACED = 1 << 20
"""In tensors with more elements, a rank's values are not searched for in the reference."""


def explained(one: Compared, far: Sequence[int], tolerance: str) -> Finding:
    """Return the finding with the known cause of a difference, or else with the element that is farthest off.

    Args:
        one: A tensor and its reference.
        far: The ranks whose values are too far from it.
        tolerance: The tolerance, as text.
    """
    alike = replace(one, role=one.role if one.role == "grad" else "scalar", whose="the reference's")
    known = _misplaced(one) or (check_unreduced(alike) if one.role == "grad" else None) or check_scale(alike)
    if known is None:
        return _value(one, far, tolerance)
    return replace(known, ranks=tuple(far))


def misshapen(tensor: Tensor, name: str, shape: Sequence[int]) -> Finding:
    """Return the finding for a tensor whose shape is not its reference's."""
    return Finding(
        "wrong-shape",
        "error",
        name,
        tuple(tensor.shards),
        f"its shape is {list(tensor.shape)} ({list(tensor.first.body.local_shape)} on rank {tensor.first.rank}), but "
        f"the reference's is {list(shape)}",
        claimed=write(tensor.claimed) if tensor.claimed else "",
        fix="attach placements to the local tensor with DTensor.from_local, so that its part is known",
    )


def _misplaced(one: Compared) -> Finding | None:
    """Return the finding if ranks hold the reference's own values, but not in the claimed places."""
    held = _held(one) if one.claimed and not one.claimed.flat and one.wanted.size <= MAX_TRACED else None
    if one.claimed is None or held is None:
        return None
    label = explain_label(one.claimed, held)
    return Finding(
        "misordered",
        "error",
        one.name,
        (),
        f"the values are the reference's, but not where the placements claim: {label.sentence}",
        claimed=write(one.claimed),
        held=label.held,
        fix=label.fix,
    )


def _held(one: Compared) -> Layout | None:
    """Return the layout of the reference's values on the ranks; None if values differ from them or repeat."""
    flat = one.wanted.ravel()
    order = np.argsort(flat)
    values = flat[order]
    if not flat.size or np.any(values[1:] == values[:-1]):
        return None
    regions = {}
    for rank, got in one.reduced.items():
        at = order[np.minimum(np.searchsorted(values, got), flat.size - 1)]
        region = region_of(at + 1, one.wanted.shape) if np.array_equal(flat[at], got) else None
        if region is None:
            return None
        regions[one.mesh.coord_of(rank)] = region
    return infer_layout(one.mesh, one.wanted.shape, regions, one.claimed)


def _value(one: Compared, far: Sequence[int], tolerance: str) -> Finding:
    apart = {rank: _apart(one, rank) for rank in far}
    rank = max(far, key=lambda rank: float(np.max(apart[rank], initial=0.0)))
    at = int(np.argmax(apart[rank]))
    got, wanted = one.reduced[rank].ravel()[at], one.wanted_of(rank).ravel()[at]
    return Finding(
        "wrong-value",
        "error",
        one.name,
        tuple(far),
        f"{len(far)} of {len(one.reduced)} ranks differ from the reference: at {_index(one, rank, at)} rank {rank} has "
        f"{got:.6g}, the reference has {wanted:.6g} ({tolerance})",
        claimed=write(one.claimed) if one.claimed else "",
        fix="start both from the same weights and the same batch; if they do, these ranks compute this tensor wrongly",
    )


def _apart(one: Compared, rank: int) -> NDArray[np.float64]:
    """Return how far each element of a rank is off; NaN is farthest."""
    got, wanted = one.reduced[rank].ravel(), one.wanted_of(rank).ravel()
    with np.errstate(invalid="ignore"):
        apart = np.abs(got - wanted)
    return np.where(got == wanted, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _index(one: Compared, rank: int, at: int) -> list[int]:
    """Return the global index of element number `at` of a rank's part."""
    number = int(one.regions[rank].flat_ids(one.wanted.shape).ravel()[at])
    return index_of(number, one.wanted.shape)
