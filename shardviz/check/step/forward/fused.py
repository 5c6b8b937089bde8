"""`wrong-segment` of a fused weight that was cut by hand in one stretch, shown by the modules around it.

Gate and up, or q, k and v, are one weight whose output the model splits into segments. Cut in one stretch, a rank has
all of one segment and none of another. The module is right, of the part that it has; the next one, which takes a whole
fraction of its features, is not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.forward.reason import Reason
from shardviz.explain.forward import SegmentsInOneStretch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Tensor
    from shardviz.layout.mesh import Mesh


def check_fused(evidence: Evidence, one: Compared) -> Reason | None:
    """Return the reason if the last right module is cut in one stretch, and the next takes one segment of it."""
    before, odd = evidence.activations.first_odd
    if not before or odd is None or before[-1].state not in ("right", "part"):
        return None
    name, reader = f"{before[-1].name}.weight", f"{odd.name}.weight"
    weight, next_weight = evidence.dump.stamped.get(name), evidence.dump.stamped.get(reader)
    if weight is None or next_weight is None or (len(weight.shape), len(next_weight.shape)) != (2, 2):
        return None
    sizes = _segments(evidence.dump.stamps[name].shape[0], evidence.dump.stamps[reader].shape[1])
    axes = [
        axis
        for axis in one.mesh.axes
        if _is_in_one_stretch(weight, one.mesh, axis, sizes) and _splits_columns(next_weight, one.mesh, axis)
    ]
    return _of_segments(name, weight.shape, odd.name, axes[0], sizes) if axes else None


def _segments(features: int, taken: int) -> list[int]:
    """Return the sizes of 2 or 3 segments: equal ones, or one as large as what is taken and two smaller ones."""
    if taken and features in (2 * taken, 3 * taken):
        return [taken] * (features // taken)
    rest, odd = divmod(features - taken, 2)
    return [taken, rest, rest] if rest > 0 and not odd and taken % rest == 0 else []


def _is_in_one_stretch(weight: Tensor, mesh: Mesh, axis: str, sizes: list[int]) -> bool:
    """Whether an axis splits dim 0 into stretches, and some rank lacks a segment or its even share of it."""
    parts = list(_ranges(weight, mesh, axis, 0))
    if not sizes or len(set(parts)) < 2 or any(stop - start == 0 for start, stop in parts):
        return False
    ends = np.cumsum([0, *sizes])
    return any(
        (min(stop, high) - max(start, low)) * len(parts) != high - low
        for start, stop in parts
        for low, high in pairwise(ends)
    )


def _splits_columns(weight: Tensor, mesh: Mesh, axis: str) -> bool:
    return len(set(_ranges(weight, mesh, axis, 1))) > 1


def _ranges(tensor: Tensor, mesh: Mesh, axis: str, dim: int) -> Iterator[tuple[int, int]]:
    """Yield the range of a dim that each rank of the first whole group along an axis holds, if it is one."""
    for group in mesh.groups(axis):
        regions = [tensor.shards[rank].held for rank in group if rank in tensor.shards]
        if len(regions) == len(group) and all(region is not None and len(region.dims[dim]) == 1 for region in regions):
            yield from (region.dims[dim][0] for region in regions if region is not None)
            return


def _of_segments(name: str, shape: tuple[int, ...], odd: str, axis: str, sizes: list[int]) -> Reason:
    cause = SegmentsInOneStretch(name, shape, tuple(sizes), axis, odd)
    return Reason(
        cause,
        f"{name} returns {shape[0]} features and {odd}, the first module that is wrong, takes {sizes[0]}; {axis} cuts "
        f"{name} in one stretch",
        tensor=name,
        claimed=cause.due if cause.has_equal_segments else "",
        held=f"[{shape[0]}/{axis}, {', '.join(map(str, shape[1:]))}]",
    )
