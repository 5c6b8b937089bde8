"""How a conversion deviates from its map: a function, number, dim, order or tensor is wrong.

A deviation is reported only if it explains all of the tensor's values.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.orders import name_order
from shardviz.checkpoint.comparing.equality import agree
from shardviz.checkpoint.comparing.one_tensor.changes import change_of
from shardviz.checkpoint.maps.functions import FUNCTIONS, INVERSE, MapArgumentError
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, Op, label_of, leaves, parts_of
from shardviz.checkpoint.maps.numbering import counted_word, renumbering, star_shared_numbers, starred
from shardviz.checkpoint.records import MemoryTensor
from shardviz.explain.checkpoints.maps import (
    AnotherSourceTensor,
    FusedShardsJoined,
    MisappliedFunction,
    PartOverwritten,
    PartsJoinedOtherwise,
    TransposedInConversion,
    WrongMapNumber,
)
from shardviz.relate.values import is_alike
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.checkpoint.comparing.equality import ContentIndex
    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.maps.mapped_tensors import Node
    from shardviz.checkpoint.records import Tensor
    from shardviz.explain.cause import Cause

MAX_NAMED = 3
"""Parts that are named."""

MAX_TRIED = 24
"""Numbers that are tried in the place of one."""

MOST_ORDERED = 4
"""Parts of different shapes that are tried in every order."""

MOST_PARTS = 3
"""Operands that are changed one at a time."""


def explain_slip(outcome: Outcome, mapped: MappedTensor, tensor: Tensor, contents: ContentIndex) -> Outcome | None:
    """Name how a tensor differs from the map's; return None if no slip explains it.

    Args:
        mapped: What it should be.
        tensor: What it is: not that.
        contents: The tensors of the side that it should be made of.
    """
    if is_alike(tensor.bits):
        return None
    for variant, cause in variants(mapped.node):
        if variant.shape == tensor.shape and _has_values(variant, mapped, tensor):
            why = f"it is {_short_text(variant)}, but the map makes {printable(mapped.text)}"
            return outcome.became("permuted", why, cause)
    return _by_parts(outcome, mapped, tensor, contents) if mapped.shape == tensor.shape else None


def _has_values(variant: Node, made: MappedTensor, tensor: Tensor) -> bool:
    node = variant if isinstance(variant, Op) else Op("cat", (variant,))
    return agree(replace(made, node=node, shape=node.shape), tensor)


def _short_text(node: Node) -> str:
    """Return how a tensor is made, with `*` for numbers; equal operands are written once."""
    if not isinstance(node, Op):
        return starred(printable(node.name))
    parts = list(dict.fromkeys(map(_short_text, node.parts)))
    return f"{node.function}({', '.join((*parts, *map(str, node.numbers)))})"


def _by_parts(outcome: Outcome, mapped: MappedTensor, tensor: Tensor, contents: ContentIndex) -> Outcome | None:
    """Name the tensors that are in the place of others; None if one of them is not known."""
    whole = tensor.bits
    odd: list[tuple[Tensor, Tensor]] = []
    num = 0
    for view, leaf in parts_of(mapped.node, whole):
        if isinstance(leaf, Op):
            return None
        num += 1
        piece = MemoryTensor(leaf.name, tensor.dtype, view.reshape(leaf.shape))
        if agree(leaf, piece):
            continue
        tensor_there = next(contents.equal_to(piece), None)
        if tensor_there is None:
            return _with_others(outcome, mapped, tensor, contents)
        odd.append((leaf, tensor_there))
    return _order_of(outcome, mapped, odd, num) if odd else None


def _with_others(outcome: Outcome, mapped: MappedTensor, tensor: Tensor, contents: ContentIndex) -> Outcome | None:
    """Say which parts differ, where some do not, and what became of the first of them."""
    odd: list[tuple[Node, MemoryTensor]] = []
    num = 0
    for view, leaf in parts_of(mapped.node, tensor.bits):
        num += 1
        piece = MemoryTensor("", tensor.dtype, view.reshape(leaf.shape))
        if isinstance(leaf, Op) or not agree(leaf, piece):
            odd.append((leaf, piece))
    if len(odd) == num:
        return None
    names = listed(label_of(part) for part, _ in odd)
    what = f"{len(odd)} of its {num} parts {'differs' if len(odd) == 1 else 'differ'}: {names}"
    if (overwritten := _overwritten(odd, contents)) is not None:
        return outcome.became(
            "other", f"{what}; {overwritten.part} is in the place of {overwritten.place}", overwritten
        )
    leaf, piece = odd[0]
    if isinstance(leaf, Op):
        return outcome.became("other", what)
    change = change_of(outcome, leaf, piece, ("the map's", "it"))
    return replace(change, why=f"{what}: {change.why}")


def _overwritten(odd: Sequence[tuple[Node, Tensor]], contents: ContentIndex) -> PartOverwritten | None:
    """Return the part that stands in the place of another one, and not in its own; None if none does."""
    names = {leaf.name for leaf, _ in odd if not isinstance(leaf, Op)}
    for leaf, piece in odd:
        part = next((there.name for there in contents.equal_to(piece) if there.name in names - {label_of(leaf)}), "")
        if part:
            return PartOverwritten(star_shared_numbers(part, label_of(leaf)), star_shared_numbers(label_of(leaf), part))
    return None


def _order_of(outcome: Outcome, mapped: MappedTensor, odd: list[tuple[Tensor, Tensor]], num: int) -> Outcome:
    """Say where each part is that is not in its place."""
    names = [leaf.name for leaf in leaves(mapped.node)]
    order = renumbering(names, {part.name: found.name for part, found in odd})
    if order is not None:
        at, numbers = order
        _, words = name_order(np.array(numbers), 0)
        words = _of_parts(words, counted_word(names[0], at))
        cause = AnotherSourceTensor(mapped.text, is_renumbered=True)
        return outcome.became("permuted", f"its parts come in a different order: {words}", cause)
    shown = [
        f"{star_shared_numbers(found.name, part.name)} where the map puts {star_shared_numbers(part.name, found.name)}"
        for part, found in odd
    ]
    words = ", ".join(dict.fromkeys(shown[:MAX_NAMED])) + (
        f", and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
    )
    several = f" in {len(odd)} of its {counted(num, 'part')}" if num > len(odd) else ""
    return outcome.became("permuted", f"it has {words}{several}", AnotherSourceTensor(mapped.text))


def _of_parts(words: str, what: str) -> str:
    """Reword a sentence about dim 0 as one about named parts, such as `experts`."""
    for phrase, several in (("dim 0's indices", ""), ("dim 0 is", " are"), ("dim 0 comes", " come")):
        words = words.replace(phrase, f"the {what}{several}")
    return words


def variants(node: Op) -> Iterator[tuple[Node, Cause]]:
    """Yield an expression's variants, each changed by one slip, with its cause."""
    for variant, cause in _slips(node):
        if _fits(variant):
            yield variant, cause
    for turned in _transposed(node):
        if _fits(turned):
            yield turned, TransposedInConversion()


def _slips(node: Node) -> Iterator[tuple[Node, Cause]]:
    """Yield variants of an expression with one mistake; equal operands get the same mistake."""
    if not isinstance(node, Op):
        return
    yield from _own_slips(node)
    inner = [list(_slips(part)) for part in node.parts]
    if len({len(slips) for slips in inner}) == 1:
        for column in zip(*inner, strict=True):
            yield replace(node, parts=tuple(one for one, _ in column)), column[0][1]
    for at, slips in enumerate(inner) if 1 < len(inner) <= MOST_PARTS else ():
        for changed, cause in slips:
            yield replace(node, parts=(*node.parts[:at], changed, *node.parts[at + 1 :])), cause


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
        of_heads = (node.shape[0], numbers[0], node.numbers[0]) if name in INVERSE else ()
        yield Op(name, node.parts, numbers), WrongMapNumber(name, *of_heads)
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
    """Yield parts concatenated instead of interleaved, and the reverse; also along other dims."""
    if node.function not in ("cat", "interleave") or len(node.parts) < 2:
        return
    dim = node.numbers[0] if node.numbers else 0
    dims = [dim, *(other for other in range(len(node.parts[0].shape)) if other != dim)]
    opposite = "cat" if node.function == "interleave" else "interleave"
    join = _join_in_torch(node, dim)
    how = "one after the other" if opposite == "cat" else "in turns"
    yield Op(opposite, node.parts, (dim,)), PartsJoinedOtherwise(how, node.function, dim, join)
    if len({part.shape for part in node.parts}) > 1 and len(node.parts) <= MOST_ORDERED:
        for order in list(permutations(node.parts))[1:]:
            yield Op(node.function, order, node.numbers), PartsJoinedOtherwise("in a different order")
    for along in dims[1:]:
        manner = f"along dim {along}"
        yield (Op(node.function, node.parts, (along,)), PartsJoinedOtherwise(manner, node.function, dim, join))


def _join_in_torch(node: Op, dim: int) -> str:
    """Return the line of torch that joins a list of parts as the map does; empty along other dims than 0."""
    if node.function == "cat":
        return f"torch.cat(parts, {dim})"
    if dim or len(node.numbers) < 2:
        return "" if dim else "torch.stack(parts, 1).flatten(0, 1)"
    return f"torch.cat([part.unflatten(0, ({node.numbers[1]}, -1)) for part in parts], 1).flatten(0, 1)"


def _by_shards(node: Op) -> Iterator[tuple[Node, Cause]]:
    """Yield a `cat` whose parts were sharded together: shards of each rank are side by side."""
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
            yield replace(node, parts=tuple(Op("transpose", (part,)) for part in node.parts))


def _fits(node: Node) -> bool:
    try:
        return node.shape is not None
    except MapArgumentError:
        return False
