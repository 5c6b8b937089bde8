"""Relations: what an array can be of the expected one, as data that composes to chains.

A chain is read from left to right. `(Permuted(0, (1, 0)), Located(layout), Scaled(0.5), Rounded("bfloat16"))` says that
each rank holds its region of the wanted tensor with its rows exchanged, halved, and rounded to bfloat16. `Pending` is
the only relation that looks at what other ranks hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardviz.layout.notation import write

if TYPE_CHECKING:
    from shardviz.layout.layout import Layout


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
        dim: The dim.
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
        axis: The axis of the mesh.
        op: The reduction: `sum`, `max` or `min`.
    """

    axis: str
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class Scaled(Relation):
    """The values are multiplied by a number.

    Attributes:
        factor: The number.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Offset(Relation):
    """A number is added to every element.

    Attributes:
        number: The number.
    """

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
