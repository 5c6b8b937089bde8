"""A tensor that is made of others, as a map says: known by its shape, and read no more than it has to be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardviz.checkpoint.maps.functions import FUNCTIONS
from shardviz.checkpoint.maps.views import MisfitError
from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.views import Shape
    from shardviz.checkpoint.tensor import Tensor
    from shardviz.layout.region import Region


@dataclass(frozen=True)
class Op:
    """A function of tensors that are there.

    Attributes:
        function: Its name.
        parts: The tensors, or what makes them.
        numbers: Its numbers.
    """

    function: str
    parts: tuple[Node, ...]
    numbers: tuple[int, ...] = ()

    @cached_property
    def shape(self) -> Shape:
        """The shape of what it makes.

        Raises:
            MisfitError: Its operands do not fit.
        """
        shapes = [part.shape for part in self.parts]
        try:
            return FUNCTIONS[self.function].shape(shapes, self.numbers)
        except MisfitError as error:
            raise MisfitError(f"{self}: {error}" if "(" not in str(error) else str(error)) from None

    def __str__(self) -> str:
        parts = [called(part) for part in self.parts]
        if len(parts) > 4:
            parts = [*parts[:2], "...", parts[-1]]
        return f"{self.function}({', '.join((*parts, *map(str, self.numbers)))})"


Node: TypeAlias = "Op | Tensor"


def called(node: Node) -> str:
    """Return what a tensor is called: its name, or how it is made."""
    return str(node) if isinstance(node, Op) else printable(node.name)


def leaves(node: Node) -> Iterator[Tensor]:
    """Yield the stored tensors that something is made of."""
    if isinstance(node, Op):
        for part in node.parts:
            yield from leaves(part)
    else:
        yield node


@dataclass(frozen=True)
class Made:
    """A tensor made of stored ones.

    Attributes:
        node: How it is made.
        shape: Its shape.
        text: The right side of the rule, with its `*`.
        where: The line of the map.
    """

    node: Op
    shape: Shape
    text: str
    where: str = ""

    @property
    def name(self) -> str:
        """How it is made, in words."""
        return str(self.node)

    @property
    def dtype(self) -> str:
        """Its dtype.

        Raises:
            DumpError: What it is made of has several.
        """
        dtypes = sorted({leaf.dtype for leaf in leaves(self.node)})
        if len(dtypes) > 1:
            raise DumpError(f"{self.name} is made of {' and '.join(dtypes)}", "save its parts in one type")
        return dtypes[0]

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers."""
        return value_of(self.node)

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""
        from shardviz.relate.values import part_of

        return part_of(self.bits, region)


def value_of(node: Node) -> NDArray[Any]:
    """Return the bits of what is stored or made: a view where that is possible, else one new array."""
    if not isinstance(node, Op):
        return node.bits
    taken = FUNCTIONS[node.function].taken
    if taken is not None:
        return taken(value_of(node.parts[0]), node.numbers)
    width = itemsize(next(leaves(node)).dtype)
    whole = np.zeros(node.shape, np.dtype(f"<u{width}"))  # padding is 0
    for view, bits in pieces(node, whole):
        view[...] = bits
    return whole


def pieces(node: Node, whole: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield the views that make up an array, each with the bits that a made tensor has there."""
    for view, part in parts_of(node, whole):
        yield view, (value_of(part)).reshape(view.shape)


def parts_of(node: Node, whole: NDArray[Any]) -> Iterator[tuple[NDArray[Any], Node]]:
    """Yield the views that make up an array, each with the tensor that belongs there, in that tensor's order."""
    views = FUNCTIONS[node.function].views if isinstance(node, Op) else None
    if not isinstance(node, Op) or views is None:
        yield whole, node
        return
    for part, view in zip(node.parts, views(whole, [part.shape for part in node.parts], node.numbers), strict=True):
        shaped = view.reshape(part.shape) if isinstance(part, Op) else view
        if shaped is view or shaped.size == 0 or np.may_share_memory(shaped, view):
            yield from parts_of(part, shaped)
        else:
            yield view, part
