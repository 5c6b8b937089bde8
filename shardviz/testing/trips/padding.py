"""Padding that a map gives a target's tensors: left out of the comparison, and looked for where the map has none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import distributed

from shardviz.checkpoint.maps.made import Op
from shardviz.checkpoint.maps.padding import PAD, dim_of, has_padding, padding_in
from shardviz.layout.layout import Layout
from shardviz.live.capture.lookup.by_reference import cast_bits
from shardviz.live.capture.stamp import bits_of_tensor, from_bits
from shardviz.relate.values import part_of
from shardviz.testing.trips.filling import region_of
from shardviz.testing.trips.mapping import entry_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.made import Node
    from shardviz.layout.region import Region
    from shardviz.live.capture.locals import Local


def without_padding(local: Local, node: Node) -> Local:
    """Return what a rank has, with the values of what is made in the place of padding: whatever is there is right."""
    own = region_of(local)
    if not has_padding(node) or local.flat or own is None or own.shape != tuple(local.values.shape):
        return local
    got, entry, padding = bits_of_tensor(local.values).copy(), entry_of(node), padding_in(node)
    for region in (*_others(local), own):  # a shard of another rank has that one's padding
        mask = part_of(padding, region)
        wanted = cast_bits(entry.read(region), entry.dtype, local.values.dtype)
        if region == own or (mask.shape == got.shape and _equal(got[~mask], wanted[~mask])):
            got[mask] = wanted[mask]
            break
    return replace(local, values=from_bits(got, local.values.dtype))


def _others(local: Local) -> Iterator[Region]:
    """Yield what other ranks have of a tensor where it is not all copies."""
    if local.claim is None:
        return
    mesh, placements = local.claim
    layout = Layout.from_placements(mesh, local.shape, placements)
    own = layout.region(mesh.coord_of(distributed.get_rank()))
    yield from (one for one in dict.fromkeys(map(layout.region, mesh.coords())) if one != own)


@dataclass(frozen=True)
class Padded:
    """A rank's own part with padding behind it, where the map pads the whole at its end.

    Attributes:
        dim: The dim that is padded.
        first: The part's first index there, in the whole.
        size: How many it has.
        more: How many are behind them.
    """

    dim: int
    first: int
    size: int
    more: int


def padded_by_rank(local: Local, node: Node) -> Padded | None:
    """Return how a rank's own part was padded; None where it was not."""
    if not isinstance(node, Op) or node.function != PAD or local.claim is None or local.flat:
        return None
    mesh, placements = local.claim
    inner, dim = node.parts[0], dim_of(node)
    part = Layout.from_placements(mesh, inner.shape, placements).region(mesh.coord_of(distributed.get_rank()))
    cut = (*(slice(None),) * dim, slice(0, part.shape[dim]))
    own = bits_of_tensor(local.values)[cut]
    wanted = cast_bits(entry_of(inner).read(part), entry_of(inner).dtype, local.values.dtype)
    size = part.shape[dim]
    found = Padded(dim, part.dims[dim][0][0] if size else 0, size, local.values.shape[dim] - size)
    return found if found.more > 0 and _equal(own, wanted) else None


def _equal(own: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return own.size > 0 and own.shape == wanted.shape and bool((own == wanted).all())
