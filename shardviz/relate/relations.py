"""Relations: what an array can be of the expected one, as data that composes to chains.

A chain is read from left to right. `(Permuted(0, (1, 0)), Located(layout), Scaled(0.5), Rounded("bfloat16"))` says that
each rank holds its region of the wanted tensor with its rows exchanged, halved, and rounded to bfloat16. `Pending` is
the only relation that looks at what other ranks hold. A pair is one tensor expected and actual; relating it gives
groups of ranks with a chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shardviz.layout.notation import write
from shardviz.relate.tolerance import Bound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh


class Relation:
    """One link of a chain."""


Chain = tuple[Relation, ...]


@dataclass(frozen=True, slots=True)
class Transposed(Relation):
    """The dims of the tensor stand in another order.

    Attributes:
        dims: For each dim, the dim of the wanted tensor that it is.
    """

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Permuted(Relation):
    """The slices along a dim stand in another order.

    Attributes:
        order: For each slice its index in the wanted tensor. An index may come twice: the slice is repeated.
    """

    dim: int
    order: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reassigned(Relation):
    """Some ranks hold the region of a different rank.

    Attributes:
        sources: Pairs of a rank and the rank whose region it holds.
    """

    sources: tuple[tuple[int, int], ...]

    def source_of(self, rank: int) -> int:
        """Return the rank whose region a rank holds."""
        return dict(self.sources).get(rank, rank)


@dataclass(frozen=True, slots=True, repr=False)
class Located(Relation):
    """Each rank holds the region that a layout gives it.

    Attributes:
        layout: The layout. With a flat view (FSDP1) a region is a range of the flattened tensor.
    """

    layout: Layout

    def __repr__(self) -> str:
        return f"Located({write(self.layout)})"


@dataclass(frozen=True, slots=True)
class Pending(Relation):
    """Each rank holds a term. Reducing the terms over an axis gives the value.

    Attributes:
        op: The reduction: `sum`, `max` or `min`.
    """

    axis: str
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class Scaled(Relation):
    """The values are multiplied by a number."""

    factor: float


@dataclass(frozen=True, slots=True)
class Offset(Relation):
    """A number is added to every element."""

    number: float


@dataclass(frozen=True, slots=True)
class Rounded(Relation):
    """The values are rounded to a dtype; behind `Pending`, their sum is.

    Attributes:
        dtype: Its name, as torch writes it without `torch.`.
    """

    dtype: str


@dataclass(frozen=True, slots=True)
class Filled(Relation):
    """Every element is one number, whatever is wanted.

    Attributes:
        value: The number. NaN means that nothing was written, if memory is filled with NaN before a run.
    """

    value: float


SURPRISE = (*(Located, Reassigned, Rounded, Scaled, Permuted, Pending, Transposed, Offset, Filled),)
"""The relations, least surprising first: of chains with as few links, the one whose links come first is meant."""


@dataclass(frozen=True)
class Pair:
    """One tensor at one place.

    Attributes:
        wanted: The whole tensor: the values of a reference, or ids, which are values that are unique.
        held: What each rank holds. Ranks whose records are the same may share one array.
        claimed: The layout that is claimed; None if nothing is claimed.
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
        return None

    def wanted_of(self, rank: int) -> NDArray[Any] | None:
        """Return what a rank should hold, in the shape of its part; None if nothing says it."""

    def held_of(self, rank: int) -> NDArray[Any]:
        """Return a rank's values after pending reductions; ids count from 1 within the tensor."""
