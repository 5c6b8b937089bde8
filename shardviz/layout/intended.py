"""An author's intent for a tensor: a layout, and the order of a dim if it isn't the model's.

`[*/tp, *] order 0: 2 0 3 1` says that dim 0's four blocks come in that order; `order 0: view(4, 2, 8).transpose(0, 1)`
that the dim is in the order of that view, the words in which a finding names one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import NotationError
from shardviz.layout.notation import Pattern, parse
from shardviz.layout.region import indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.layout.layout import Layout

ORDER = re.compile(r"(?P<layout>.*?)\s+order\s+(?P<dim>\d+)\s*:\s*(?P<rule>.*)", re.DOTALL)
VIEW = re.compile(r"view\((?P<shape>[\d,\s]+)\)\.transpose\((?P<one>\d+),\s*(?P<other>\d+)\)")
HINT = 'write "[*/tp, *] order 0: 2 0 3 1", or "[*/tp, *] order 0: view(4, 2, 8).transpose(0, 1)"'


@dataclass(frozen=True, slots=True)
class DimOrder:
    """The intended order of one dim.

    Attributes:
        dim: Which dim.
        shape: The shape that the dim is viewed as.
        swapped: The two dims of that view that are transposed; None if `blocks` says the order.
        blocks: The block that each place holds.
    """

    dim: int
    shape: tuple[int, ...] = ()
    swapped: tuple[int, int] | None = None
    blocks: tuple[int, ...] = ()

    def index(self, size: int) -> NDArray[np.int64]:
        """Return the index that each place of a dim of this size holds.

        Raises:
            NotationError: The size does not divide into the blocks, or is not that of the view.
        """
        if self.swapped is not None:
            if math.prod(self.shape) != size:
                raise NotationError(
                    f"the order's view {list(self.shape)} has {math.prod(self.shape)} of {size} indices"
                )
            view: NDArray[np.int64] = np.arange(size).reshape(self.shape).swapaxes(*self.swapped).ravel()
            return view
        if size % len(self.blocks):
            raise NotationError(f"dim {self.dim} of size {size} has no {len(self.blocks)} equal blocks")
        rows: NDArray[np.int64] = np.arange(size).reshape(len(self.blocks), -1)[list(self.blocks)].ravel()
        return rows

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can have the order."""
        size = shape[self.dim] if self.dim < len(shape) else -1
        return math.prod(self.shape) == size if self.swapped is not None else size >= 0 == size % len(self.blocks)

    def of(self, whole: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return a whole tensor with the dim in this order.

        Raises:
            NotationError: The tensor has no such dim, or the order does not fit it.
        """
        if self.dim >= whole.ndim:
            raise NotationError(f"the order is of dim {self.dim}, and the tensor has {whole.ndim}")
        return whole.take(self.index(whole.shape[self.dim]), self.dim)

    def places(self, ids: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the intended places of ids that count from 1; ids outside the tensor stay."""
        moved = self.of(np.arange(1, math.prod(shape) + 1).reshape(shape)).ravel()
        place = np.empty(moved.size + 1, np.int64)
        place[moved] = np.arange(1, moved.size + 1)
        own = (ids > 0) & (ids <= moved.size)
        return np.where(own, place[np.where(own, ids, 1)], ids)


def split_order(text: str) -> tuple[str, DimOrder | None]:
    """Return the layout of an intention, and the order that it names.

    Raises:
        NotationError: The order cannot be read.
    """
    match = ORDER.fullmatch(text)
    if match is None:
        return text, None
    dim, rule = int(match["dim"]), match["rule"].strip()
    view = VIEW.fullmatch(rule)
    if view is not None:
        shape = tuple(int(size) for size in view["shape"].split(",") if size.strip())
        swapped = int(view["one"]), int(view["other"])
        if max(swapped) >= len(shape):
            raise NotationError(f"{rule} transposes dim {max(swapped)} of {len(shape)}", HINT)
        return match["layout"], DimOrder(dim, shape, swapped)
    numbers = re.split(r"[,\s]+", rule)
    if not all(number.isdecimal() for number in numbers) or sorted(map(int, numbers)) != list(range(len(numbers))):
        raise NotationError(f"{rule!r} does not name every block from 0 once", HINT)
    return match["layout"], DimOrder(dim, blocks=tuple(map(int, numbers)))


def order_between(claimed: Layout, held: Layout) -> str:
    """Return the intention of a tensor whose segments are in rank order, and that is held as claimed then; else empty.

    Each rank holds its part of every segment, as of a fused q, k and v, and placements claim one stretch.
    """
    if held.shape != claimed.shape or held.mesh != claimed.mesh or claimed.flat or held.flat:
        return ""
    for dim, chain in enumerate(held.chains):
        count = next((link for link in chain if isinstance(link, int)), 0)
        axes = [link for link in claimed.chains[dim] if link in claimed.mesh.axes]
        for number in range(1, len(axes) + 1) if count > 1 else ():
            ways = claimed.mesh.size_over(map(str, axes[:number]))
            rows, rest = divmod(held.shape[dim], count * ways)
            order = DimOrder(dim, (count, ways, rows), (0, 1))
            if ways > 1 and not rest and _is_ordered(claimed, held, order):
                layout = Pattern((None,) * len(claimed.shape), claimed.chains)
                return f"{layout} order {dim}: view({count}, {ways}, {rows}).transpose(0, 1)"
    return ""


def _is_ordered(claimed: Layout, held: Layout, order: DimOrder) -> bool:
    """Whether every rank holds what is claimed for it of a tensor with a dim in an order."""
    index = order.index(held.shape[order.dim])
    for (_, first), (_, second) in zip(claimed.regions(), held.regions(), strict=True):
        for dim, (one, other) in enumerate(zip(first.dims, second.dims, strict=True)):
            places = indices(one)
            if not np.array_equal(index[places] if dim == order.dim else places, indices(other)):
                return False
    return True


def parse_intended(text: str) -> Pattern:
    """Return the layout of an intention, which may name an order too.

    Raises:
        NotationError: It cannot be read.
    """
    return parse(split_order(text)[0])
