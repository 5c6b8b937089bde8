"""Padding that a map says is there, as behind the last row of a vocabulary that has to shard evenly: never compared."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardviz.checkpoint.maps.made import Made, Op, called, parts_of
from shardviz.layout.region import indices
from shardviz.relate.values import part_of
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.made import Node
    from shardviz.checkpoint.tensor import Tensor
    from shardviz.layout.region import Region

PAD = "pad"
Spans: TypeAlias = "dict[tuple[int, int], tuple[Tensor, list[tuple[int, int]]]]"
"""Stretches of tensors along a dim, by the tensor's identity and the dim."""


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
        what = _which(dim, len(node.shape))
        of = "" if is_whole else f" of {called(node)}"
        yield f"{what} {node.parts[0].shape[dim]:,} to {node.shape[dim] - 1:,}{of}"
    for part in node.parts:
        yield from _stretches(part, is_whole=is_whole and node.function == PAD)


def _which(dim: int, ndim: int) -> str:
    return "rows" if dim == 0 else "columns" if ndim == 2 else f"dim {dim} at"


def without_padding(made: Made, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors without what a map says is padding at their ends: what is made, and what should be that."""
    node: Node = made.node
    while isinstance(node, Op) and node.function == PAD and node.shape == held.shape:
        part, dim = node.parts[0], dim_of(node)
        cut = Op("slice", (held.node if isinstance(held, Made) else held,), (0, part.shape[dim], dim))
        held, node = Made(cut, cut.shape, str(cut)), part
    return (Made(node, node.shape, made.text, made.where) if isinstance(node, Op) else node), held


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
            what = f"{printable(tensor.name)}: {_which(dim, len(tensor.shape))}"
            texts += [f"{what} {start:,} to {stop - 1:,}" for start, stop in _gaps(used, tensor.shape[dim])]
    return texts


def _add_used(node: Node, whole: set[int], spans: Spans) -> None:
    """Note which tensors are used as a whole, and which stretches of others: by identity, for two may have one name."""
    if not isinstance(node, Op):
        whole.add(id(node))
        return
    part = node.parts[0]
    if node.function not in ("slice", "split") or isinstance(part, Op):
        for one in node.parts:
            _add_used(one, whole, spans)
        return
    first, second, *rest = node.numbers
    dim = (rest[0] if rest else 0) % len(part.shape)
    size = part.shape[dim] // first if node.function == "split" else 0
    span = (first, second) if node.function == "slice" else (second * size, (second + 1) * size)
    spans.setdefault((id(part), dim), (part, []))[1].append(span)


def _gaps(used: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    at, gaps = 0, []
    for start, stop in [*sorted(used), (size, size)]:
        gaps += [(at, start)] if start > at else []
        at = max(at, stop)
    return gaps
