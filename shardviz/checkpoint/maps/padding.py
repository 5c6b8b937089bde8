"""Padding that a map says is there, as behind the last row of a vocabulary that has to shard evenly: never compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.maps.made import Made, Op, called, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.made import Node
    from shardviz.checkpoint.tensor import Tensor

PAD = "pad"


def has_padding(node: Node) -> bool:
    """Whether some of what is made is padding."""
    return isinstance(node, Op) and (node.function == PAD or any(map(has_padding, node.parts)))


def padding_in(node: Node) -> NDArray[np.bool_]:
    """Return which elements of what is made are padding."""
    found = np.ones(node.shape, bool)
    for view, _ in parts_of(node, found):
        view[...] = False
    return found


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
        what = "rows" if dim == 0 else "columns" if len(node.shape) == 2 else f"dim {dim} at"
        of = "" if is_whole else f" of {called(node)}"
        yield f"{what} {node.parts[0].shape[dim]:,} to {node.shape[dim] - 1:,}{of}"
    for part in node.parts:
        yield from _stretches(part, is_whole=is_whole and node.function == PAD)


def without_padding(made: Made, held: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors without what a map says is padding at their ends: what is made, and what should be that."""
    node: Node = made.node
    while isinstance(node, Op) and node.function == PAD and node.shape == held.shape:
        part, dim = node.parts[0], dim_of(node)
        cut = Op("slice", (_as_node(held),), (0, part.shape[dim], dim))
        held, node = Made(cut, cut.shape, str(cut)), part
    return (Made(node, node.shape, made.text, made.where) if isinstance(node, Op) else node), held


def _as_node(tensor: Tensor) -> Any:
    return tensor.node if isinstance(tensor, Made) else tensor
