"""A tensor that a map makes of others: its shape is known at once, its values when read.

What a map says is padding, as behind the last row of a vocabulary that has to shard evenly, is never compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardviz.checkpoint.maps.functions import FUNCTIONS, MapArgumentError
from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.layout.region import gaps_in, indices
from shardviz.relate.values import part_of
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.functions import Shape
    from shardviz.checkpoint.records import Tensor
    from shardviz.layout.region import Region

Node: TypeAlias = "Op | Tensor"
PAD = "pad"
Spans: TypeAlias = "dict[tuple[int, int], tuple[Tensor, list[tuple[int, int]]]]"
"""Stretches of tensors along a dim, by the tensor's identity and the dim."""


@dataclass(frozen=True)
class Op:
    """A function applied to tensors that exist.

    Attributes:
        parts: The tensors, or what makes them.
    """

    function: str
    parts: tuple[Node, ...]
    numbers: tuple[int, ...] = ()

    @cached_property
    def shape(self) -> Shape:
        """The shape of what it makes.

        Raises:
            MapArgumentError: Its operands do not fit.
        """
        shapes = [part.shape for part in self.parts]
        try:
            return FUNCTIONS[self.function].shape(shapes, self.numbers)
        except MapArgumentError as error:
            raise MapArgumentError(f"{self}: {error}" if "(" not in str(error) else str(error)) from None

    def __str__(self) -> str:
        parts = [label_of(part) for part in self.parts]
        if len(parts) > 4:
            parts = [*parts[:2], "...", parts[-1]]
        return f"{self.function}({', '.join((*parts, *map(str, self.numbers)))})"


def label_of(node: Node) -> str:
    """Return what a tensor is called: its name, or how it is made."""
    return str(node) if isinstance(node, Op) else printable(node.name)


def leaves(node: Node) -> Iterator[Tensor]:
    """Yield the stored tensors that something is made of."""
    if isinstance(node, Op):
        for operand in node.parts:
            yield from leaves(operand)
    else:
        yield node


@dataclass(frozen=True)
class MappedTensor:
    """A tensor that a map makes of stored ones.

    Attributes:
        node: How it is made.
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
        return part_of(self.bits, region)


def value_of(node: Node) -> NDArray[Any]:
    """Return the bits of a stored or mapped tensor: a view if possible, else a new array."""
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
    for view, leaf in parts_of(node, whole):
        yield view, (value_of(leaf)).reshape(view.shape)


def parts_of(node: Node, whole: NDArray[Any]) -> Iterator[tuple[NDArray[Any], Node]]:
    """Yield the views that make up an array, each with the source tensor that belongs there."""
    views = FUNCTIONS[node.function].views if isinstance(node, Op) else None
    if not isinstance(node, Op) or views is None:
        yield whole, node
        return
    for operand, view in zip(node.parts, views(whole, [part.shape for part in node.parts], node.numbers), strict=True):
        shaped = view.reshape(operand.shape) if isinstance(operand, Op) else view
        if shaped is view or shaped.size == 0 or np.may_share_memory(shaped, view):
            yield from parts_of(operand, shaped)
        else:
            yield view, operand


def has_padding(node: Node) -> bool:
    """Whether some of what is made is padding."""
    return isinstance(node, Op) and (node.function == PAD or any(map(has_padding, node.parts)))


def padding_in(node: Node) -> NDArray[np.bool_]:
    """Return which elements of what is made are padding."""
    is_padding = np.ones(node.shape, bool)
    for view, _ in parts_of(node, is_padding):
        view[...] = False
    return is_padding


def padding_of(node: Op, region: Region) -> NDArray[np.bool_]:
    """Return which elements of a part of what is made are padding."""
    if node.function != PAD or has_padding(node.parts[0]):
        return np.asarray(part_of(padding_in(node), region))
    dim = dim_of(node)
    along = indices(region.dims[dim]) >= node.parts[0].shape[dim]
    return np.broadcast_to(along.reshape([-1 if at == dim else 1 for at in range(len(region.dims))]), region.shape)


def dim_of(pad: Op) -> int:
    """Return the dim that a pad makes longer."""
    return (pad.numbers[1] if len(pad.numbers) > 1 else 0) % max(1, len(pad.shape))


def padding_text(node: Node) -> str:
    """Say what of a made tensor is not compared.

    Example:
        >>> from types import SimpleNamespace
        >>> padding_text(Op("pad", (SimpleNamespace(name="head", shape=(32000, 8)),), (32768,)))
        'rows 32,000 to 32,767'
    """
    return ", ".join(_stretches(node, is_whole=True))


def _stretches(node: Node, *, is_whole: bool) -> Iterator[str]:
    if not isinstance(node, Op):
        return
    if node.function == PAD and node.parts[0].shape != node.shape:
        dim = dim_of(node)
        what = _dim_text(dim, len(node.shape))
        of = "" if is_whole else f" of {label_of(node)}"
        yield f"{what} {node.parts[0].shape[dim]:,} to {node.shape[dim] - 1:,}{of}"
    for operand in node.parts:
        yield from _stretches(operand, is_whole=is_whole and node.function == PAD)


def _dim_text(dim: int, ndim: int) -> str:
    return "rows" if dim == 0 else "columns" if ndim == 2 else f"dim {dim} at"


def without_padding(mapped: MappedTensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mapped tensor and its counterpart without the padding at their ends."""
    node: Node = mapped.node
    while isinstance(node, Op) and node.function == PAD and node.shape == held.shape:
        operand, dim = node.parts[0], dim_of(node)
        cut = Op("slice", (held.node if isinstance(held, MappedTensor) else held,), (0, operand.shape[dim], dim))
        held, node = MappedTensor(cut, cut.shape, str(cut)), operand
    return (MappedTensor(node, node.shape, mapped.text, mapped.where) if isinstance(node, Op) else node), held


def unused_texts(nodes: Iterable[Node]) -> list[str]:
    """Say which stretches of tensors a map leaves out, if it takes slices and parts of them.

    Example:
        >>> from types import SimpleNamespace
        >>> head = SimpleNamespace(name="head", shape=(32768, 8))
        >>> unused_texts([Op("slice", (head,), (0, 32000))])
        ['head: rows 32,000 to 32,767']
    """
    whole: set[int] = set()
    spans: Spans = {}
    for node in nodes:
        _add_used(node, whole, spans)
    dims = Counter(tensor for tensor, _ in spans)
    texts = []
    for (key, dim), (tensor, used) in spans.items():
        if key not in whole and dims[key] == 1:
            what = f"{printable(tensor.name)}: {_dim_text(dim, len(tensor.shape))}"
            texts += [f"{what} {start:,} to {stop - 1:,}" for start, stop in gaps_in(used, tensor.shape[dim])]
    return texts


def _add_used(node: Node, whole: set[int], spans: Spans) -> None:
    """Note the tensors used as a whole, and the used stretches of others, by identity."""
    if not isinstance(node, Op):
        whole.add(id(node))
        return
    operand = node.parts[0]
    if node.function not in ("slice", "split") or isinstance(operand, Op):
        for node_part in node.parts:
            _add_used(node_part, whole, spans)
        return
    first, second, *more = node.numbers
    dim = (more[0] if more else 0) % len(operand.shape)
    size = operand.shape[dim] // first if node.function == "split" else 0
    span = (first, second) if node.function == "slice" else (second * size, (second + 1) * size)
    spans.setdefault((id(operand), dim), (operand, []))[1].append(span)
