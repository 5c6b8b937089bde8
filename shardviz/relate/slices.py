"""Slices of a whole tensor that ranks have in another order, or on other ranks than a split puts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.relate.orders import places_of
from shardviz.relate.values import slices_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Slices:
    """Where slices along one dim stand in the whole.

    Attributes:
        dim: The dim.
        size: How many slices the whole has.
        at: The place of each slice that is not zero.
        is_repeated: Whether one rank has a slice several times.
    """

    dim: int
    size: int
    at: frozenset[int]
    is_repeated: bool

    @property
    def is_whole(self) -> bool:
        """Whether every slice is there, and none twice on one rank."""
        return len(self.at) == self.size and not self.is_repeated

    @staticmethod
    def joined(of_ranks: Sequence[Slices | None]) -> Slices | None:
        """Return what all ranks have together; None if one of them has something else than slices."""
        present = [slices for slices in of_ranks if slices is not None]
        if len(present) < len(of_ranks) or len({slices.dim for slices in present}) != 1:
            return None
        every = frozenset().union(*(slices.at for slices in present))
        return Slices(present[0].dim, present[0].size, every, any(slices.is_repeated for slices in present))


def places_in(values: NDArray[np.float64], whole: NDArray[np.float64], near: float) -> Slices | None:
    """Return the slices of the whole that values are made of, and of zeros as padding; None if of anything else.

    Args:
        values: What a rank holds.
        whole: The whole tensor.
        near: How far an element may be off.
    """
    slices = places_of(values, whole, near)
    if slices is None:
        return None
    dim, at = slices
    is_padding = (at < 0) & ~slices_of(values, dim).any(axis=1)
    if np.any((at < 0) & ~is_padding):
        return None
    places = at[at >= 0].tolist()
    return Slices(dim, whole.shape[dim], frozenset(places), len(set(places)) < len(places))
