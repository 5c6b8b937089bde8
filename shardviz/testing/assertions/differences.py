"""What a difference between a tensor and its reference is called: a scale, a missing sum, another order, a value."""

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
"""Tensors of more elements are not searched for where a rank's values stand in the reference."""


def explained(one: Compared, far: Sequence[int], tolerance: str) -> Finding:
    """Name what is known to give such a difference, or else the element that is farthest off.

    Args:
        one: A tensor beside its reference.
        far: The ranks whose values are too far from it.
        tolerance: What is allowed, as text.
    """
    alike = replace(one, role=one.role if one.role == "grad" else "scalar", whose="the reference's")
    known = _misplaced(one) or (check_unreduced(alike) if one.role == "grad" else None) or check_scale(alike)
    if known is None:
        return _value(one, far, tolerance)
    return replace(known, ranks=tuple(far))


def misshapen(tensor: Tensor, name: str, shape: Sequence[int]) -> Finding:
    """Tell a tensor that has another shape than its reference."""
    return Finding(
        "wrong-shape",
        "error",
        name,
        tuple(tensor.shards),
        f"its shape is {list(tensor.shape)} ({list(tensor.first.body.local_shape)} on rank {tensor.first.rank}), the "
        f"reference's {list(shape)}",
        claimed=write(tensor.claimed) if tensor.claimed else "",
        fix="give the placements to the local tensor, DTensor.from_local, so that its part is known",
    )


def _misplaced(one: Compared) -> Finding | None:
    """Return the finding if ranks hold the reference's own values, in other places than claimed."""
    held = _held(one) if one.claimed and not one.claimed.flat and one.wanted.size <= MAX_TRACED else None
    if one.claimed is None or held is None:
        return None
    told = explain_label(one.claimed, held)
    return Finding(
        "misordered",
        "error",
        one.name,
        (),
        f"the values are the reference's, but not where the placements say: {told.sentence}",
        claimed=write(one.claimed),
        held=told.held,
        fix=told.fix,
    )


def _held(one: Compared) -> Layout | None:
    """Return where ranks hold the reference's values; None where they are not those, or not each of its own."""
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
        f"{len(far)} of {len(one.reduced)} ranks hold other values than the reference: at {_index(one, rank, at)} rank "
        f"{rank} has {got:.6g}, the reference {wanted:.6g} ({tolerance})",
        claimed=write(one.claimed) if one.claimed else "",
        fix="start both from the same weights and the same batch; if they do, this tensor goes wrong on these ranks",
    )


def _apart(one: Compared, rank: int) -> NDArray[np.float64]:
    """Return how far each element of a rank is off; NaN is farthest."""
    got, wanted = one.reduced[rank].ravel(), one.wanted_of(rank).ravel()
    with np.errstate(invalid="ignore"):
        apart = np.abs(got - wanted)
    return np.where(got == wanted, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _index(one: Compared, rank: int, at: int) -> list[int]:
    """Return the index in the whole tensor of the element number `at` of a rank's part."""
    number = int(one.regions[rank].flat_ids(one.wanted.shape).ravel()[at])
    return index_of(number, one.wanted.shape)
