"""What a conversion makes that has a slip in one place: a function left out, turned round, or of other numbers."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

from shardviz.checkpoint.maps.functions import FUNCTIONS, INVERSE
from shardviz.checkpoint.maps.made import Op
from shardviz.checkpoint.maps.views import MisfitError
from shardviz.explain.conversion import (
    FusedShardsJoined,
    MisappliedFunction,
    PartsJoinedOtherwise,
    TransposedInConversion,
    WrongMapNumber,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.checkpoint.maps.made import Node
    from shardviz.explain.cause import Cause

MAX_TRIED = 24
"""Numbers that are tried in the place of one."""

MOST_ORDERED = 4
"""Parts of different shapes that are tried in every order."""

MOST_PARTS = 3
"""Operands that are changed one at a time."""


def variants(node: Op) -> Iterator[tuple[Node, Cause]]:
    """Yield what a slip makes of an expression, each with its cause."""
    for variant, cause in _slips(node):
        if _fits(variant):
            yield variant, cause
    for turned in _transposed(node):
        if _fits(turned):
            yield turned, TransposedInConversion()


def _slips(node: Node) -> Iterator[tuple[Node, Cause]]:
    """Yield a function and its operands, changed in one place; what is the same in all operands is changed in all."""
    if not isinstance(node, Op):
        return
    yield from _own_slips(node)
    inner = [list(_slips(part)) for part in node.parts]
    if len({len(slips) for slips in inner}) == 1:
        for column in zip(*inner, strict=True):
            yield replace_parts(node, tuple(one for one, _ in column)), column[0][1]
    for at, slips in enumerate(inner) if 1 < len(inner) <= MOST_PARTS else ():
        for one, cause in slips:
            yield replace_parts(node, (*node.parts[:at], one, *node.parts[at + 1 :])), cause


def replace_parts(node: Op, parts: tuple[Node, ...]) -> Op:
    """Return a function of other operands."""
    return Op(node.function, parts, node.numbers)


def _own_slips(node: Op) -> Iterator[tuple[Node, Cause]]:
    name = node.function
    is_single = len(node.parts) == 1 and FUNCTIONS[name].views is not None
    if is_single:
        yield node.parts[0], MisappliedFunction(name, 0, _in_torch(node))
    if name in INVERSE:
        back = Op(INVERSE[name], node.parts, node.numbers)
        yield back, MisappliedFunction(name, -1, _in_torch(node))
    if is_single:
        yield Op(name, (node,), node.numbers), MisappliedFunction(name, 2)
    for numbers in _other_numbers(node):
        yield Op(name, node.parts, numbers), WrongMapNumber(name)
    yield from _other_joins(node)
    yield from _by_shards(node)


def _in_torch(node: Op) -> str:
    if node.function not in INVERSE or len(node.shape) != 2:
        return ""
    view = "head_dim // 2, 2" if node.function == "rotary" else "2, head_dim // 2"
    return f"w.view(-1, {view}, w.shape[1]).transpose(1, 2).reshape(w.shape)"


def _other_numbers(node: Op) -> Iterator[tuple[int, ...]]:
    if node.function in INVERSE:
        rows = node.shape[0]
        heads = [size for size in range(4, rows + 1, 2) if rows % size == 0 and size != node.numbers[0]]
        yield from ((head,) for head in heads[:MAX_TRIED])
    elif node.function == "interleave":
        along = node.numbers[0] if node.numbers else 0
        sizes = [part.shape[along] for part in node.parts]
        blocks = [size for size in range(2, min(sizes) + 1) if not any(one % size for one in sizes)]
        yield from ((along, size) for size in blocks[:MAX_TRIED] if (along, size) != node.numbers)
    elif node.function == "split":
        count, which, *dim = node.numbers
        yield from ((count, other, *dim) for other in range(min(count, MAX_TRIED)) if other != which)
    elif node.function == "take":
        size = node.parts[0].shape[node.numbers[1] if len(node.numbers) > 1 else 0]
        yield from ((other, *node.numbers[1:]) for other in range(min(size, MAX_TRIED)) if other != node.numbers[0])


def _other_joins(node: Op) -> Iterator[tuple[Node, Cause]]:
    """Yield parts beside each other where they should be in turns, and the other way round; and along other dims."""
    if node.function not in ("cat", "interleave") or len(node.parts) < 2:
        return
    dim = node.numbers[0] if node.numbers else 0
    dims = [dim, *(other for other in range(len(node.parts[0].shape)) if other != dim)]
    other = "cat" if node.function == "interleave" else "interleave"
    how = "one after the other" if other == "cat" else "in turns"
    yield Op(other, node.parts, (dim,)), PartsJoinedOtherwise(how, node.function, dim)
    if len({part.shape for part in node.parts}) > 1 and len(node.parts) <= MOST_ORDERED:
        for order in list(permutations(node.parts))[1:]:
            yield Op(node.function, order, node.numbers), PartsJoinedOtherwise("in another order")
    for along in dims[1:]:
        manner = f"along dim {along}"
        yield Op(node.function, node.parts, (along,)), PartsJoinedOtherwise(manner, node.function, dim)


def _by_shards(node: Op) -> Iterator[tuple[Node, Cause]]:
    """Yield parts that were cut over ranks together, and whose shards were put behind each other."""
    if node.function != "cat" or len(node.parts) < 2:
        return
    dim = node.numbers[0] if node.numbers else 0
    sizes = [part.shape[dim] for part in node.parts]
    for ranks in [size for size in range(2, min(sizes)) if not any(one % size for one in sizes)][:MAX_TRIED]:
        yield Op("interleave", node.parts, (dim, ranks)), FusedShardsJoined(ranks, dim)


def _transposed(node: Op) -> Iterator[Op]:
    ndim = len(node.shape)
    if ndim >= 2:
        yield Op("transpose", (node,))
        if all(len(part.shape) >= 2 for part in node.parts) and not (ndim == 2 and len(node.parts) == 1):
            yield replace_parts(node, tuple(Op("transpose", (part,)) for part in node.parts))


def _fits(node: Node) -> bool:
    try:
        return node.shape is not None
    except MisfitError:
        return False
