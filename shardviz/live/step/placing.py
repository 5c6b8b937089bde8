"""Infer the layout of plain activations: the placements that fit the unsharded model's values on every rank.

A module between tensor-parallel ones returns plain tensors without placements, and a DTensor on a sub-mesh lacks the
batch's axes. The unsharded model's step has every activation whole, so a rank's part is compared with every part that
chunking could give it. An activation that no part fits may be a term of a sum: ranks exchange the first few of these,
and those that add up to a part along an axis are pending there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.stamp import dtype_name
from shardviz.live.step.trace.fitting import fitting, numpy_of
from shardviz.relate.sums import placements_of_sum
from shardviz.relate.tolerance import ELEMENT, EXACT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.layout.candidates import Placements
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region
    from shardviz.live.capture.locals import Local

MAX_SUMMED = 4
"""At most this many activations that no part fits are tried as terms of a sum."""

MAX_ELEMENTS = 1 << 16
"""Activations with more elements are not exchanged."""

MAX_WHOLE = 1 << 20
"""Of the unsharded model's activations that no part fits, as many as these elements are written down."""


def placed(locals_: Mapping[str, Local], wholes: Mapping[str, Local], mesh: Mesh, rank: int) -> list[Local]:
    """Give activations without placements the claim that fits on every rank that has them.

    Every rank calls this; the stages of a pipeline have different activations.

    Args:
        locals_: This rank's activations by module.
        wholes: The unsharded model's.
        mesh: The run's mesh.
        rank: This rank.

    Returns:
        The activations; if no placements fit on every rank, an activation claims only the whole's shape.
    """
    fits = {
        name: list(fitting(local.values, wholes[name].values, mesh, rank, _close(local.values.dtype)))
        for name, local in locals_.items()
        if name in wholes and (local.claim is None or local.shape != wholes[name].shape)
    }
    of_all = of_all_ranks(fits)
    by_name = {name: _claimed(local, fits.get(name, []), of_all, wholes, mesh) for name, local in locals_.items()}
    odd = [local for name, local in by_name.items() if name in fits and local.claim is None]
    small = {local.name: local.values.cpu() for local in odd if local.values.numel() <= MAX_ELEMENTS}
    by_name |= _pending(by_name, dict(list(small.items())[:MAX_SUMMED]), wholes, mesh)
    return list(by_name.values())


def wholes_of_odd(activations: list[Local], wholes: Mapping[str, Local]) -> Iterator[Local]:
    """Yield the unsharded model's activations of modules whose outputs no placements fit, the first of them."""
    elements = 0
    for local in activations:
        whole = wholes.get(local.name)
        if whole is not None and local.claim is None:
            elements += whole.values.numel()
            if elements > MAX_WHOLE:
                return
            yield replace(whole, claim=None, grad=None)


def _pending(
    by_name: Mapping[str, Local], mine: Mapping[str, torch.Tensor], wholes: Mapping[str, Local], mesh: Mesh
) -> dict[str, Local]:
    """Return the activations that are terms of a sum along one axis, with that claim. Every rank calls this."""
    of_all = dict(enumerate(of_all_ranks(dict(mine))))
    pending = {}
    for name in mine:
        terms = {rank: values[name] for rank, values in of_all.items() if name in values and rank in mesh}
        fits = partial(_fits, wholes[name].values.cpu(), mesh, _close(mine[name].dtype))
        placements = placements_of_sum({rank: numpy_of(term) for rank, term in terms.items()}, mesh, fits, None)
        if placements is not None:
            pending[name] = replace(by_name[name], shape=wholes[name].shape, claim=(mesh, placements))
    return pending


def _claimed(
    local: Local,
    fits: list[Placements],
    of_all: list[dict[str, list[Placements]]],
    wholes: Mapping[str, Local],
    mesh: Mesh,
) -> Local:
    for placements in fits:
        if all(placements in of_rank[local.name] for of_rank in of_all if local.name in of_rank):
            return replace(local, shape=wholes[local.name].shape, claim=(mesh, placements))
    whole = wholes.get(local.name)
    return replace(local, shape=whole.shape) if whole is not None and local.claim is None else local


def _fits(whole: torch.Tensor, mesh: Mesh, close: Close, rank: int, total: NDArray[np.float64]) -> Iterator[Placements]:
    return fitting(torch.from_numpy(total), whole, mesh, rank, close)


@dataclass(frozen=True)
class Close:
    """Whether values are near to a part, as `torch.allclose` has it."""

    tolerance: float

    def is_near(self, values: torch.Tensor, wanted: torch.Tensor, _region: Region, _scale: float) -> bool:
        """Whether values are those wanted."""
        return bool(torch.allclose(values.double(), wanted.double(), rtol=self.tolerance, atol=self.tolerance))


def _close(dtype: torch.dtype) -> Close:
    return Close(ELEMENT.get(dtype_name(dtype), EXACT))
