"""A pair, one tensor wanted and held, and what comes of relating it: groups of ranks with one chain each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardviz.relate.tolerance import Bound

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        candidates: Other tensors by name, whose values may be held instead, or added.
    """

    wanted: NDArray[Any]
    held: Mapping[int, NDArray[Any]]
    claimed: Layout | None
    mesh: Mesh
    bound: Bound = field(default_factory=Bound)
    candidates: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose arrays are explained in the same way.

    Attributes:
        ranks: The ranks, in order.
        chain: The chain of fewest links that gives them what they hold; None if none does.
        certain: Whether the error is below the floor of the bound on all of them. Between floor and limit nobody can
            tell whether it is rounding.
        alternatives: Chains with as few links that explain the ranks as well.
    """

    ranks: tuple[int, ...]
    chain: Chain | None
    certain: bool = True
    alternatives: tuple[Chain, ...] = ()


@dataclass(frozen=True, slots=True)
class Related:
    """What the ranks of a pair hold of the wanted tensor.

    Attributes:
        groups: The groups of ranks, the largest first.
    """

    groups: tuple[Group, ...]

    @property
    def chain(self) -> Chain | None:
        """The chain of all ranks; None if there are several groups, or none explains them."""
        return self.groups[0].chain if len(self.groups) == 1 else None
