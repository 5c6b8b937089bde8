"""What a conversion did instead of what its map says: a function left out, turned round, with another number or dim,
its parts in another order, or another tensor in the place of one.

Nothing is guessed: what is named has all of the tensor's values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.order.infer.orders import name_order
from shardviz.checkpoint.comparing.agreement import agree
from shardviz.checkpoint.comparing.changed.changes import change_of
from shardviz.checkpoint.maps.made import Made, Op, called, leaves, parts_of
from shardviz.checkpoint.maps.numbering import against, around, renumbering, starred
from shardviz.checkpoint.maps.slips import variants
from shardviz.explain.conversion import AnotherSourceTensor
from shardviz.relate.values import is_alike, part_of
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.elsewhere.contents import Contents
    from shardviz.checkpoint.comparing.outcome import Verdict
    from shardviz.checkpoint.maps.made import Node
    from shardviz.checkpoint.tensor import Tensor
    from shardviz.explain.cause import Cause
    from shardviz.layout.region import Region

MAX_NAMED = 3
"""Parts that are named."""


@dataclass(frozen=True, slots=True)
class Instead:
    """What a tensor is, in the place of what the map makes.

    Attributes:
        why: That in words, the same for every layer.
        explanation: What the conversion did; None where that is not clear.
        verdict: That in a word.
    """

    why: str
    explanation: Cause | None = None
    verdict: Verdict = "permuted"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor.

    Attributes:
        name: What it should be.
        shape: Its shape.
        dtype: Its element type.
        bits: Its values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bits: NDArray[Any]

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part."""
        return part_of(self.bits, region)


def instead_of(made: Made, tensor: Tensor, known: Contents) -> Instead | None:
    """Return what a tensor is instead of what a map makes; None where that cannot be named.

    Args:
        made: What it should be.
        tensor: What it is: not that.
        known: The tensors of the side that it should be made of.
    """
    if is_alike(tensor.bits):
        return None
    for variant, cause in variants(made.node):
        if variant.shape == tensor.shape and _is(variant, made, tensor):
            return Instead(f"it is {_short(variant)}, where the map makes {printable(made.text)}", cause)
    return _by_parts(made, tensor, known) if made.shape == tensor.shape else None


def _is(variant: Node, made: Made, tensor: Tensor) -> bool:
    node = variant if isinstance(variant, Op) else Op("cat", (variant,))
    return agree(replace(made, node=node, shape=node.shape), tensor)


def _short(node: Node) -> str:
    """Return how something is made, with `*` for numbers, and once what is the same of all operands."""
    if not isinstance(node, Op):
        return starred(printable(node.name))
    parts = list(dict.fromkeys(map(_short, node.parts)))
    return f"{node.function}({', '.join((*parts, *map(str, node.numbers)))})"


def _by_parts(made: Made, tensor: Tensor, known: Contents) -> Instead | None:
    """Name the tensors that are in the place of others; None where one of them is not known."""
    whole = tensor.bits
    odd: list[tuple[Tensor, Tensor]] = []
    num = 0
    for view, part in parts_of(made.node, whole):
        if isinstance(part, Op):
            return None
        num += 1
        piece = Piece(part.name, part.shape, tensor.dtype, view.reshape(part.shape))
        if agree(part, piece):
            continue
        found = next(known.equal_to(piece), None)
        if found is None:
            return _with_others(made, tensor)
        odd.append((part, found))
    return _order_of(made, odd, num) if odd else None


def _with_others(made: Made, tensor: Tensor) -> Instead | None:
    """Say which parts differ, where some do not, and what became of the first of them."""
    odd: list[tuple[Node, Piece]] = []
    num = 0
    for view, part in parts_of(made.node, tensor.bits):
        num += 1
        piece = Piece("", part.shape, tensor.dtype, view.reshape(part.shape))
        if isinstance(part, Op) or not agree(part, piece):
            odd.append((part, piece))
    if len(odd) == num:
        return None
    names = listed((called(part) for part, _ in odd), MAX_NAMED)
    what = f"{len(odd)} of its {num} parts {'differs' if len(odd) == 1 else 'differ'}: {names}"
    part, piece = odd[0]
    if isinstance(part, Op):
        return Instead(what, verdict="other")
    change = change_of(part, piece, ("the map's", "it"))
    return Instead(f"{what}: {change.why}", change.explanation, change.verdict)


def _order_of(made: Made, odd: list[tuple[Tensor, Tensor]], num: int) -> Instead:
    """Say where each part is that is not in its place."""
    names = [leaf.name for leaf in leaves(made.node)]
    order = renumbering(names, {part.name: found.name for part, found in odd})
    if order is not None:
        at, numbers = order
        _, words = name_order(np.array(numbers), 0)
        words = _of_parts(words, around(names[0], at))
        return Instead(f"its parts come in another order: {words}", AnotherSourceTensor(made.text, is_renumbered=True))
    shown = [
        f"{against(found.name, part.name)} where the map puts {against(part.name, found.name)}" for part, found in odd
    ]
    words = ", ".join(dict.fromkeys(shown[:MAX_NAMED])) + (
        f", and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
    )
    several = f" in {len(odd)} of its {counted(num, 'part')}" if num > len(odd) else ""
    return Instead(f"it has {words}{several}", AnotherSourceTensor(made.text))


def _of_parts(words: str, what: str) -> str:
    """Return a sentence about a dim's indices as one about parts: `experts`, or whatever their number counts."""
    return re.sub(r"dim 0's indices (are|come)|dim 0 (is)|dim 0 (comes)", _plural(what), words)


def _plural(what: str) -> Callable[[re.Match[str]], str]:
    verbs = {"is": "are", "comes": "come"}
    return lambda found: f"the {what} {verbs.get(found[found.lastindex or 0], found[found.lastindex or 0])}"
