"""Every stamped tensor, laid out once for checks, pictures, comparisons and assertions.

Nearly all tensors of a healthy dump hold what they claim. These are not laid out: claimed and held ranges are compared
as they stand in the dump.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from shardviz.check.order.case import cases_of
from shardviz.relate.pair import Group, Related
from shardviz.relate.relations import Located

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.order.case import Case
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.layout.intended import DimOrder
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Ranges


def is_as_claimed(dump: Dump, tensor: Tensor) -> bool:
    """Whether all ranks claim one layout of the whole stamped tensor and hold what it says."""
    layout = tensor.claimed
    if layout is None or len(tensor.shards) != len(layout.mesh.ranks):
        return False
    claimed = claimed_dims(layout)
    for rank, shard in tensor.shards.items():
        if shard.layout is not layout and shard.layout != layout:
            return False
        claimed_here = claimed.get(rank, ((),))
        if shard.body.held != claimed_here and (0 not in shard.body.local_shape or all(claimed_here)):
            return False
    return all(name not in dump.stamps or dump.stamps[name].shape == layout.tensor_shape for name in tensor.names)


@lru_cache(maxsize=256)
def claimed_dims(layout: Layout) -> dict[int, tuple[Ranges, ...]]:
    """Return the ranges that each rank of a layout's mesh claims in each dim."""
    return {rank: region.dims for rank, region in layout.regions()}


MAX_KEPT = 1 << 24
"""Numbers that are kept of all cases together; past that, a tensor is laid out again when it is asked for."""

KEPT_PER_SHARD = 32
"""What a shard takes in addition to its ids, in numbers."""


class LaidOut:
    """The stamped tensors of a dump, each laid out when it is first asked for.

    Attributes:
        dump: The dump.
    """

    def __init__(self, dump: Dump) -> None:
        """Lay out nothing yet."""
        self.dump = dump
        self._cases: dict[tuple[str, str, bool], tuple[Case, ...]] = {}
        self._room = MAX_KEPT

    def cases(self, tensor: Tensor, name: str, *, claims: bool = True) -> tuple[Case, ...]:
        """Return a tensor's cases, one for each mesh of its ranks; none if it was not stamped.

        Args:
            tensor: The tensor, or the fold that it is in.
            name: Its name.
            claims: Whether the placements are used; they cannot be if even the global shape is wrong.

        Raises:
            DumpError: The dump does not have the ids, or there are too many to lay out.
        """
        if tensor.moment != "stamped":
            return ()
        key = (tensor.role, name, claims)
        if key not in self._cases:
            cases = tuple(cases_of(self.dump, tensor, name, claims=claims))
            num_ids = sum(ids.size for case in cases for ids in case.ids.values())
            size = num_ids + KEPT_PER_SHARD * sum(len(case.shards) for case in cases)
            if size > self._room:
                return cases
            self._room -= size
            self._cases[key] = cases
        return self._cases[key]


@dataclass(frozen=True)
class PairOfIds:
    """A stamped tensor on one mesh: each rank's ids as claimed, and as held.

    It is laid out again when it is asked for, if it is too large to be kept.

    Attributes:
        laid_out: The dump's tensors.
        tensor: The tensor, or the fold that it is in.
        name: Its name.
        mesh: The mesh.
        wanted: The layout: what is claimed, or what is intended; None if a plain tensor claims nothing.
        order: The order that a dim is meant to have; None for its own.
    """

    laid_out: LaidOut
    tensor: Tensor
    name: str
    mesh: Mesh
    wanted: Layout | None
    order: DimOrder | None = None

    @property
    def case(self) -> Case:
        """The tensor as the judge had it."""
        case = next(case for case in self.laid_out.cases(self.tensor, self.name) if case.mesh == self.mesh)
        return case if self.order is None else case.in_order(self.order)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh that have the tensor, rising."""
        case = self.case
        return tuple(sorted(map(case.rank, case.shards)))

    @property
    def related(self) -> Related | None:
        """The layout that the ranks hold; None if the notation has none for it."""
        held = self.case.held
        return Related((Group(self.ranks, (Located(held),)),)) if held is not None else None

    def wanted_of(self, rank: int) -> NDArray[np.int64] | None:
        """Return the ids that a rank should hold, from 1 within the tensor; None if nothing says it."""
        if self.wanted is None:
            return None
        return self.wanted.region(self.mesh.coord_of(rank)).flat_ids(self.wanted.index_shape) + 1

    def held_of(self, rank: int) -> NDArray[np.int64]:
        """Return a rank's ids, from 1 within the tensor; ids of other tensors are 0 or negative."""
        return self.case.local_ids(self.mesh.coord_of(rank))
