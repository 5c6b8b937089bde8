"""The layout notation: `float32[12/tp/fsdp, 12] =ep +cp`. Only this module reads it.

    layout  = [dtype] "[" [dim {"," dim}] "]" {"=" axis | "+" axis [":" reduction]}
    dim     = size chain | "(" dim ")" chain
    chain   = {"/" (axis | number)}
    size    = number | "*"
    flat    = "flat(" sizes ")" ["at" offset "of" total] chain        the only dim of FSDP1's parameters

A dim's chain names what splits it, outermost first. A number splits without distributing; parentheses glue what it cut
before the next split. `=axis` says that copies along an axis are equal, which is implied for every axis not named.

An author's intent may add the order of a dim, if it isn't the model's: `[*/tp, *] order 0: 2 0 3 1` says that dim 0's
four blocks come in that order; `order 0: view(4, 2, 8).transpose(0, 1)` that the dim is in the order of that view, the
words in which a finding names one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardviz.errors import LayoutError, NotationError
from shardviz.layout.dtypes import dtype_hint, is_dtype
from shardviz.layout.layout import FlatView, Layout
from shardviz.layout.mesh import AXIS_NAME
from shardviz.layout.placements import REDUCTIONS
from shardviz.layout.region import MAX_DIMS, indices
from shardviz.layout.splits import JOIN, Chain, axes_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh

MAX_LENGTH = 4096
MAX_DIGITS = 18
SHOWN = 80
"""Of a text longer than this, a message shows the beginning."""

Item = TypeVar("Item")

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.]*|[0-9]+|\S|\Z)")
_NAME = re.compile("[A-Za-z_]")
_NUMBER = re.compile("[0-9]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A layout as written, before it meets a mesh and a shape.

    Attributes:
        sizes: The size of each dim; None if `*` stands for any.
        chains: How each dim is split.
        dtype: The dtype, without `torch.`; empty for any.
        equal: Axes written as `=axis`.
        partial: Axes written as `+axis`, with their reduction.
        flat: The stretch of a flattened concatenation; its total, if written, is the one size in `sizes`.
    """

    sizes: tuple[int | None, ...]
    chains: tuple[Chain, ...]
    dtype: str = ""
    equal: tuple[str, ...] = ()
    partial: tuple[tuple[str, str], ...] = ()
    flat: FlatView | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that is named, each once."""
        split = [axis for chain in self.chains for axis in axes_in(chain)]
        return tuple(dict.fromkeys([*split, *self.equal, *(axis for axis, _ in self.partial)]))

    def layout(self, mesh: Mesh, shape: Sequence[int] | None = None) -> Layout:
        """Return the layout on `mesh`.

        Args:
            mesh: The mesh whose axes the pattern names.
            shape: Sizes for the dims written as `*`.

        Raises:
            NotationError: A size is `*` and no shape is given, or the shape is another.
            LayoutError: The pattern names an axis twice, or one that is both split and equal; a flat tensor does not
                lie within its concatenation.
            MeshError: The mesh has no such axis.
        """
        sizes = self._sizes(mesh, shape)
        layout = Layout(mesh, sizes, self.chains, self.partial, self.flat)
        for axis in self.equal:
            mesh.axis_index(axis)
            if axis not in layout.replicate_axes:
                raise LayoutError(f"axis {axis} is marked as equal, but is also split or pending", f"drop ={axis}")
        return layout

    def _sizes(self, mesh: Mesh, shape: Sequence[int] | None) -> tuple[int, ...]:
        if shape is not None and not self.fits_shape(shape):
            raise NotationError(f"layout {self} does not fit a tensor of shape {list(shape)}")
        if self.flat:
            return (_padded(self.flat, self.chains[0], mesh) if self.sizes[0] is None else self.sizes[0],)
        if shape is None and None in self.sizes:
            raise NotationError("a layout with * needs the shape of a tensor", "write the sizes, as in [12/tp, 12]")
        wanted = self.sizes if shape is None else tuple(shape)
        return tuple(size for size in wanted if size is not None)

    def fits_shape(self, shape: Sequence[int]) -> bool:
        """Whether every written size is the shape's."""
        if self.flat:
            return self.flat.shape == tuple(shape)
        return len(shape) == len(self.sizes) and all(
            size in (None, actual) for size, actual in zip(self.sizes, shape, strict=True)
        )

    def matches(self, layout: Layout, dtype: str = "") -> bool:
        """Whether `layout` puts every element where this pattern does, however either is spelled.

        A flat layout is matched by a flat pattern only.

        Raises:
            LayoutError: As `layout`.
            MeshError: The layout's mesh has no such axis.
        """
        if not self.fits_shape(layout.tensor_shape) or (self.dtype and dtype and self.dtype != dtype):
            return False
        own = self.layout(layout.mesh, layout.tensor_shape)
        return set(own.partial) == set(layout.partial) and own.same_regions(layout)

    def __str__(self) -> str:
        if self.flat:
            dims = [_chain_text(_flat_text(self.flat, self.sizes[0]), self.chains[0])]
        else:
            dims = [
                _chain_text("*" if size is None else str(size), chain)
                for size, chain in zip(self.sizes, self.chains, strict=True)
            ]
        return f"{self.dtype}[{', '.join(dims)}]" + _suffixes(self.equal, self.partial)


def write(layout: Layout, dtype: str = "", *, equal: bool = False) -> str:
    """Write a layout in the notation.

    Args:
        dtype: The dtype to put before it.
        equal: Also name the axes along which copies are equal.

    Example:
        >>> from shardviz.layout.mesh import parse_mesh
        >>> layout = parse("[12/tp, *] +fsdp").layout(parse_mesh("fsdp=2,tp=4"), (12, 8))
        >>> write(layout, "float32")
        'float32[12/tp, 8] +fsdp'
    """
    if layout.flat:
        plain = layout.flat.offset == 0 and layout.shape[0] == _padded(layout.flat, layout.chains[0], layout.mesh)
        sizes: tuple[int | None, ...] = (None if plain else layout.shape[0],)
    else:
        sizes = layout.shape
    named = layout.replicate_axes if equal else ()
    return str(Pattern(sizes, layout.chains, dtype, named, layout.partial, layout.flat))


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Read a layout in the notation.

    Raises:
        NotationError: The text is not a layout; the message names the column where reading failed.

    Example:
        >>> pattern = parse("float32[12/tp/fsdp, *]")
        >>> pattern.dtype, pattern.sizes, pattern.chains
        ('float32', (12, None), (('tp', 'fsdp'), ()))
    """
    return _Parser(text).pattern()


def _padded(flat: FlatView, chain: Chain, mesh: Mesh) -> int:
    """Return the length of a flat concatenation of one tensor, padded to equal shards."""
    parts = mesh.size_over(axes_in(chain))
    return -(-math.prod(flat.shape) // parts) * parts


def _flat_text(flat: FlatView, total: int | None) -> str:
    own = f"flat({', '.join(map(str, flat.shape))})"
    return own if total is None else f"{own} at {flat.offset} of {total}"


def _chain_text(size: str, chain: Chain) -> str:
    text = size
    for link in chain:
        text = f"({text})" if link == JOIN else f"{text}/{link}"
    return text


def _suffixes(equal: Sequence[str], partial: Sequence[tuple[str, str]]) -> str:
    pending = [f" +{axis}" if op == "sum" else f" +{axis}:{op}" for axis, op in partial]
    return "".join([f" ={axis}" for axis in equal] + pending)


class _Parser:
    """Reads the grammar in this module's docstring, token by token."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise NotationError(f"layout {self._quoted_text()} has {len(text):,} characters, more than {MAX_LENGTH:,}")
        self.tokens = [(match[1], match.start(1)) for match in _TOKEN.finditer(text)]
        self.position = 0

    def peek(self) -> str:
        return self.tokens[self.position][0]

    def take(self) -> str:
        token = self.peek()
        self.position += bool(token)
        return token

    def accept(self, wanted: str) -> bool:
        return self.peek() == wanted and bool(self.take())

    def expect(self, wanted: str) -> None:
        if not self.accept(wanted):
            raise self.error(repr(wanted))

    def error(self, wanted: str) -> NotationError:
        start = self.tokens[self.position][1]
        found = repr(self.text[start : start + 12]) if self.peek() else "the end"
        return NotationError(
            f"layout {self._quoted_text()}: expected {wanted} at column {start + 1}, found {found}",
            "write it as [12/tp/fsdp, 12]: each dim's size, then the axes that split it, outermost first",
        )

    def _quoted_text(self) -> str:
        return repr(self.text) if len(self.text) <= SHOWN else f"{self.text[:SHOWN]!r}..."

    def number(self) -> int:
        if not _NUMBER.match(self.peek()):
            raise self.error("a number")
        if len(self.peek()) > MAX_DIGITS:
            raise self.error(f"a number of at most {MAX_DIGITS} digits")
        return int(self.take())

    def axis(self, wanted: str = "an axis") -> str:
        if not AXIS_NAME.fullmatch(self.peek()):
            raise self.error(wanted)
        return self.take()

    def pattern(self) -> Pattern:
        dtype = "" if self.peek() == "[" else self.dtype()
        self.expect("[")
        if self.peek() == "flat":
            flat, total, chain = self.flat()
            self.expect("]")
            return Pattern((total,), (chain,), dtype, *self.suffixes(), flat)
        dims = self.listed("]", self.dim)
        if len(dims) > MAX_DIMS:
            raise NotationError(f"layout {self._quoted_text()} has {len(dims)} dims, more than {MAX_DIMS}")
        return Pattern(tuple(size for size, _ in dims), tuple(chain for _, chain in dims), dtype, *self.suffixes())

    def dtype(self) -> str:
        if not _NAME.match(self.peek()):
            raise self.error("'[' or a dtype")
        name = self.take().removeprefix("torch.")
        if self.peek() == "[" and not is_dtype(name):
            raise NotationError(f"layout {self._quoted_text()}: {name} is not a dtype", dtype_hint(name))
        return name

    def listed(self, close: str, read: Callable[[], Item]) -> list[Item]:
        """Read items separated by commas up to `close`."""
        items: list[Item] = []
        while not self.accept(close):
            items.append(read())
            if not self.accept(",") and self.peek() != close:
                raise self.error(f"',' or {close!r}")
        return items

    def flat(self) -> tuple[FlatView, int | None, Chain]:
        self.expect("flat")
        self.expect("(")
        shape = tuple(self.listed(")", self.number))
        offset, total = 0, None
        if self.accept("at"):
            offset = self.number()
            self.expect("of")
            total = self.number()
        return FlatView(shape, offset), total, self.links()

    def dim(self) -> tuple[int | None, Chain]:
        opened = 0
        while self.accept("("):
            opened += 1
        size = None if self.accept("*") else self.number()
        chain = self.links()
        for _ in range(opened):
            self.expect(")")
            rest = self.links()
            chain = (*chain, JOIN, *rest) if rest else chain
        return size, chain

    def links(self) -> Chain:
        chain: list[str | int] = []
        while self.accept("/"):
            chain.append(self.segments() if _NUMBER.match(self.peek()) else self.axis("an axis or a number"))
        return tuple(chain)

    def segments(self) -> int:
        if not self.peek().strip("0"):
            raise self.error("an axis, or a number from 1")
        return self.number()

    def suffixes(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        equal, partial = [], []
        while self.peek():
            if self.accept("="):
                equal.append(self.axis())
            elif self.accept("+"):
                partial.append((self.axis(), self.reduction() if self.accept(":") else "sum"))
            else:
                raise self.error("'=' or '+'")
        return tuple(equal), tuple(partial)

    def reduction(self) -> str:
        if self.peek() not in REDUCTIONS:
            raise self.error("one of " + ", ".join(REDUCTIONS))
        return self.take()


ORDER = re.compile(r"(?P<layout>.*?)\s+order\s+(?P<dim>\d+)\s*:\s*(?P<rule>.*)", re.DOTALL)
VIEW = re.compile(r"view\((?P<shape>[\d,\s]+)\)\.transpose\((?P<one>\d+),\s*(?P<other>\d+)\)")
HINT = 'write "[*/tp, *] order 0: 2 0 3 1", or "[*/tp, *] order 0: view(4, 2, 8).transpose(0, 1)"'


@dataclass(frozen=True, slots=True)
class DimOrder:
    """The intended order of one dim.

    Attributes:
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
