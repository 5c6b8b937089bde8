"""The relations: what an array can be of a wanted one. They are data without words, and compose to chains.

A chain is read from left to right. `(Permuted(0, (1, 0)), Located(layout), Scaled(0.5), Rounded("bfloat16"))` says that
each rank holds its region of the wanted tensor with its rows exchanged, halved, and rounded to bfloat16. `Pending` is
the only relation that looks at what other ranks hold, so `replay` applies it to the held arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.relate.casts import rounded
from shardviz.relate.values import padded, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout

    Values = NDArray[np.float64]


class Relation:
    """One link of a chain."""

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return what the values of a rank become.

        Args:
            values: The values so far: the whole tensor until `Located`, then the rank's part.
            rank: The rank.
            candidates: Other tensors by name.
        """
        raise NotImplementedError


Chain = tuple[Relation, ...]


@dataclass(frozen=True, slots=True)
class From(Relation):
    """The values are those of another tensor, layer or phase.

    Attributes:
        name: Its name among the pair's candidates.
    """

    name: str

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the other tensor."""
        return np.asarray(candidates[self.name], np.float64)


@dataclass(frozen=True, slots=True)
class Transposed(Relation):
    """The dims of the tensor stand in another order.

    Attributes:
        dims: For each dim, the dim of the wanted tensor that it is.
    """

    dims: tuple[int, ...]

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the values with their dims permuted."""
        turned: Values = values.transpose(self.dims)
        return turned


@dataclass(frozen=True, slots=True)
class Permuted(Relation):
    """The slices along a dim stand in another order.

    Attributes:
        dim: The dim.
        order: For each slice its index in the wanted tensor. An index may come twice: the slice is repeated.
    """

    dim: int
    order: tuple[int, ...] = field(repr=False)

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the slices in their order."""
        return values.take(self.order, self.dim)


@dataclass(frozen=True, slots=True)
class Padded(Relation):
    """Zeros fill a dim up to a size, behind its end.

    Attributes:
        dim: The dim.
        size: Its size with the padding.
    """

    dim: int
    size: int

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the values with zeros behind them."""
        return padded(values, self.dim, self.size)


@dataclass(frozen=True, slots=True)
class Plus(Relation):
    """Another tensor, multiplied by a number, is added to the whole tensor.

    Attributes:
        factor: The number.
        name: The name of the other tensor among the pair's candidates.
    """

    factor: float
    name: str

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the sum."""
        return values + self.factor * candidates[self.name]


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

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the values: only the rank changes, for the `Located` behind."""
        return values


@dataclass(frozen=True, slots=True)
class Located(Relation):
    """Each rank holds the region that a layout gives it.

    Attributes:
        layout: The layout. With a flat view (FSDP1) a region is a range of the flattened tensor.
    """

    layout: Layout

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the rank's part."""
        region = self.layout.region(self.layout.mesh.coord_of(rank))
        return part_of(values.reshape(self.layout.index_shape), region)


@dataclass(frozen=True, slots=True)
class Pending(Relation):
    """Each rank holds a term. Reducing the terms over an axis gives the value.

    Attributes:
        axis: The axis of the mesh.
        op: The reduction: `sum`, `max` or `min`.
    """

    axis: str
    op: str = "sum"

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the values: what is held is reduced instead."""
        return values


@dataclass(frozen=True, slots=True)
class Scaled(Relation):
    """The values are multiplied by a number.

    Attributes:
        factor: The number.
    """

    factor: float

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the product."""
        return values * self.factor


@dataclass(frozen=True, slots=True)
class Offset(Relation):
    """A number is added to every element.

    Attributes:
        number: The number.
    """

    number: float

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the sum."""
        return values + self.number


@dataclass(frozen=True, slots=True)
class Rounded(Relation):
    """The values are rounded to a dtype; behind `Pending`, their sum is.

    Attributes:
        dtype: Its name, as torch writes it without `torch.`.
    """

    dtype: str

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return the values rounded to the nearest, ties to even."""
        return rounded(values, self.dtype)


@dataclass(frozen=True, slots=True)
class Filled(Relation):
    """Every element is one number, whatever is wanted.

    Attributes:
        value: The number. NaN means that nothing was written, if memory is filled with NaN before a run.
    """

    value: float

    def apply(self, values: Values, rank: int, candidates: Mapping[str, NDArray[Any]]) -> Values:
        """Return an array of the number."""
        return np.full(values.shape, self.value)


SURPRISE = (*(Located, Reassigned, Rounded, Scaled, Permuted, Pending, Padded, Transposed, Offset, Filled, Plus, From),)
"""The relations, least surprising first: of chains with as few links, the one whose links come first is meant."""
