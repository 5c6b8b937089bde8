"""Find by content which part of the unsharded model's values a rank has: a split over the mesh, or a term of a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardviz.layout.candidates import placements_of
from shardviz.relate.tolerance import MANY, TYPICAL_POINT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.layout.candidates import Placements
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region
    from shardviz.live.step.placing import Close


@dataclass(frozen=True)
class Allowed:
    """How far a point may be off.

    Attributes:
        most: How far any element may be.
        moved: How far rounding alone moves each element of the whole; None if that was not tried.
        least: The root of the mean square that is allowed in any case, relative to that of the values.
    """

    most: float
    moved: torch.Tensor | None = None
    least: float = 0.0

    def is_near(self, values: torch.Tensor, wanted: torch.Tensor, region: Region, scale: float) -> bool:
        """Whether values are a region of the whole, given what is wanted there, times a number."""
        apart = (values - wanted * scale).abs()
        if not bool((apart <= self.most * max(1.0, abs(scale))).all()):
            return False
        if self.moved is None or apart.numel() < MANY:
            return True
        allowed = max(TYPICAL_POINT * _root(part_of(self.moved, region)), self.least * _root(wanted))
        return _root(apart) <= allowed * abs(scale)


def _root(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def fitting(
    values: torch.Tensor, whole: torch.Tensor, mesh: Mesh, rank: int, allowed: Allowed | Close, scale: float = 1.0
) -> Iterator[Placements]:
    """Yield the placements that give a rank the values that it has, fewest splits first.

    Args:
        values: This rank's.
        whole: The unsharded model's.
        mesh: The run's mesh.
        rank: This rank.
        allowed: How far they may be off.
        scale: What the unsharded model's values are multiplied by here, as gradients of a rank's own mean are.
    """
    for placements, region in placements_of(tuple(whole.shape), tuple(values.shape), mesh, rank):
        if allowed.is_near(values, part_of(whole, region), region, scale):
            yield placements


def part_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a region of a tensor."""
    if all(len(spans) == 1 for spans in region.dims):
        return whole[tuple(slice(*spans[0]) for spans in region.dims)]
    return whole.flatten()[torch.from_numpy(region.flat_ids(tuple(whole.shape))).to(whole.device)]


def numpy_of(values: torch.Tensor) -> NDArray[np.float64]:
    """Return values as float64 on the CPU."""
    return values.detach().double().cpu().numpy()
