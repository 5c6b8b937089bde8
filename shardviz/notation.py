"""The layout notation: `float32[12/tp/fsdp, 12] =ep +cp`, read and written here and nowhere else.

    layout  = [dtype] "[" [dim {"," dim}] "]" {"=" axis | "+" axis [":" reduction]}
    dim     = size chain | "(" dim ")" chain
    chain   = {"/" (axis | number)}
    size    = number | "*"
    flat    = "flat(" sizes ")" ["at" offset "of" total] chain        the only dim of FSDP1's parameters

A dim's chain names what splits it, outermost first. A number splits without distributing; parentheses glue what it cut
before the next split. `=axis` says that copies along an axis are equal, which is implied for every axis not named.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from shardviz.errors import LayoutError, NotationError
from shardviz.layout import JOIN, Chain, FlatView, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.mesh import Mesh

REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum")
_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.]*|\d+|\*|[\[\](),/=+:]|$)")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A layout as written, before it meets a mesh and a shape.

    Attributes:
        sizes: The size of each dim; None where `*` stands for any.
        chains: How each dim is split.
        dtype: The element type, without `torch.`; empty for any.
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

    def layout(self, mesh: Mesh, shape: Sequence[int] | None = None) -> Layout:
        """Return the layout on `mesh`.

        Args:
            mesh: The mesh whose axes the pattern names.
            shape: Sizes for the dims written as `*`.

        Raises:
            NotationError: A size is `*` and no shape is given, or the shape is another.
            LayoutError: The pattern names an axis twice, or one that is both split and equal.
            MeshError: The mesh has no such axis.
        """
        sizes = self._flat_sizes(mesh) if self.flat else self._sizes(shape)
        layout = Layout(mesh, sizes, self.chains, self.partial, self.flat)
        for axis in self.equal:
            mesh.axis_index(axis)
            if axis not in layout.replicate_axes:
                raise LayoutError(f"axis {axis} is written as equal and as split or pending", f"drop ={axis}")
        return layout

    def _sizes(self, shape: Sequence[int] | None) -> tuple[int, ...]:
        if shape is None and None in self.sizes:
            raise NotationError("a layout with * needs a shape to be applied to", "write the sizes, as in [12/tp, 12]")
        wanted = tuple(shape) if shape is not None else ()
        if shape is not None and not self.fits_shape(wanted):
            raise NotationError(f"layout {self} does not fit a tensor of shape {list(wanted)}")
        return tuple(wanted[dim] if size is None else size for dim, size in enumerate(self.sizes))

    def _flat_sizes(self, mesh: Mesh) -> tuple[int, ...]:
        assert self.flat is not None
        if self.sizes[0] is not None:
            return (self.sizes[0],)
        parts = math.prod(mesh.axis_size(link) if isinstance(link, str) else link for link in self.chains[0])
        return (_padded(math.prod(self.flat.shape), parts),)

    def fits_shape(self, shape: Sequence[int]) -> bool:
        """Whether every written size is the shape's."""
        if self.flat:
            return self.flat.shape == tuple(shape)
        return len(shape) == len(self.sizes) and all(
            size in (None, actual) for size, actual in zip(self.sizes, shape, strict=True)
        )

    def matches(self, layout: Layout, dtype: str = "") -> bool:
        """Whether `layout` puts every element where this pattern does, however either is spelled."""
        if not self.fits_shape(layout.tensor_shape) or (self.dtype and dtype and self.dtype != dtype):
            return False
        own = self.layout(layout.mesh, None if self.flat else layout.tensor_shape)
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
        layout: What to write.
        dtype: The element type to put before it.
        equal: Also name the axes along which copies are equal.
    """
    if layout.flat:
        parts = math.prod(layout.mesh.axis_size(link) for link in layout.chains[0] if isinstance(link, str))
        plain = layout.flat.offset == 0 and layout.shape[0] == _padded(math.prod(layout.flat.shape), parts)
        sizes: tuple[int | None, ...] = (None if plain else layout.shape[0],)
    else:
        sizes = layout.shape
    named = layout.replicate_axes if equal else ()
    return str(Pattern(sizes, layout.chains, dtype, named, layout.partial, layout.flat))


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Read a layout in the notation.

    Raises:
        NotationError: The text is no layout; the message says at which column it stops being one.
    """
    return _Parser(text).pattern()


def _padded(numel: int, parts: int) -> int:
    return -(-numel // parts) * parts


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
    """Recursive descent over the grammar in this module's docstring."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def peek(self) -> str:
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            raise self.error("a name, a number or one of [ ] ( ) , / = + : *")
        return match[1]

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if wanted and token not in wanted:
            raise self.error(" or ".join(map(repr, wanted)))
        match = _TOKEN.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return token

    def error(self, wanted: str) -> NotationError:
        column = len(self.text) - len(self.text[self.position :].lstrip()) + 1
        found = self.text[column - 1 :][:12] or "the end"
        return NotationError(
            f"layout {self.text!r}: expected {wanted} at column {column}, found {found!r}",
            "write it as [12/tp/fsdp, 12]: each dim's size, then the axes that split it, outermost first",
        )

    def number(self) -> int:
        if not re.fullmatch(r"\d{1,18}", self.peek()):
            raise self.error("a number")
        return int(self.take())

    def name(self) -> str:
        if not re.match(r"[A-Za-z_]", self.peek()):
            raise self.error("an axis")
        return self.take()

    def pattern(self) -> Pattern:
        dtype = "" if self.peek() == "[" else self.name()
        self.take("[")
        flat, sizes, chains = None, [], []
        if self.peek() == "flat":
            flat, total, chain = self.flat()
            sizes, chains = [total], [chain]
            self.take("]")
        else:
            while self.peek() != "]":
                size, chain = self.dim()
                sizes.append(size)
                chains.append(chain)
                if self.peek() != "]":
                    self.take(",", "/")
            self.take("]")
        equal, partial = self.suffixes()
        return Pattern(tuple(sizes), tuple(chains), dtype.removeprefix("torch."), equal, partial, flat)

    def flat(self) -> tuple[FlatView, int | None, Chain]:
        self.take("flat")
        self.take("(")
        shape = []
        while self.peek() != ")":
            shape.append(self.number())
            if self.peek() != ")":
                self.take(",")
        self.take(")")
        offset, total = 0, None
        if self.peek() == "at":
            self.take("at")
            offset = self.number()
            self.take("of")
            total = self.number()
        return FlatView(tuple(shape), offset), total, self.links()

    def dim(self) -> tuple[int | None, Chain]:
        if self.peek() == "(":
            self.take("(")
            size, chain = self.dim()
            self.take(")")
            rest = self.links()
            return size, (*chain, JOIN, *rest) if rest else chain
        if self.peek() == "*":
            self.take("*")
            return None, self.links()
        return self.number(), self.links()

    def links(self) -> Chain:
        chain: list[str | int] = []
        while self.peek() == "/":
            self.take("/")
            chain.append(self.number() if self.peek().isdigit() else self.name())
        return tuple(chain)

    def suffixes(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        equal, partial = [], []
        while self.peek():
            if self.take("=", "+") == "=":
                equal.append(self.name())
                continue
            axis, op = self.name(), "sum"
            if self.peek() == ":":
                self.take(":")
                op = self.take(*REDUCTIONS)
            partial.append((axis, op))
        return tuple(equal), tuple(partial)
