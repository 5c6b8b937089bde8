"""A pair, one tensor expected and actual, and what relating it gives: groups with a chain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shardviz.relate.tolerance import Bound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh
    from shardviz.relate.relations import Chain


@dataclass(frozen=True)
class Pair:
    """One tensor at one place.

    Attributes:
        wanted: The whole tensor: the values of a reference, or ids, which are values that are unique.
        held: What each rank holds. Ranks whose records are the same may share one array.
        claimed: The layout that is claimed; None if nothing is claimed.
        mesh: The mesh of the ranks.
        bound: How far rounding may take what is held from what is wanted.
    """

    wanted: NDArray[Any]
    held: Mapping[int, NDArray[Any]]
    claimed: Layout | None
    mesh: Mesh
    bound: Bound = field(default_factory=Bound)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose arrays are explained in the same way.

    Attributes:
        ranks: The ranks, in order.
        chain: The chain of fewest links that gives them what they hold; None if none does.
    """

    ranks: tuple[int, ...]
    chain: Chain | None


@dataclass(frozen=True, slots=True)
class Related:
    """What the ranks of a pair hold of the wanted tensor.

    Attributes:
        groups: The groups of ranks, the largest first.
    """

    groups: tuple[Group, ...]

    @property
    def chain(self) -> Chain | None:
        """The chain that explains all ranks; None if no single chain does, and `groups` has what there is."""
        return self.groups[0].chain if len(self.groups) == 1 else None


class RankPair(Protocol):
    """A pair as a judge has it and a finding carries it: read rank by rank, when somebody asks."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that were compared, rising."""

    @property
    def related(self) -> Related | None:
        """What the judge recognized; None if it names no relation."""

    def wanted_of(self, rank: int) -> NDArray[Any] | None:
        """Return what a rank should hold, in the shape of its part; None if nothing says it."""

    def held_of(self, rank: int) -> NDArray[Any]:
        """Return a rank's values after pending reductions; ids count from 1 within the tensor."""
