"""What a conversion did instead of what its map says: a function left out, turned round, with another number or dim,
its parts in another order, or another tensor in the place of one.

Nothing is guessed: what is named has all of the tensor's values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.check.order.infer.orders import name_order
from shardviz.checkpoint.comparing.agreement import agree
from shardviz.checkpoint.maps.functions import FUNCTIONS, INVERSE, MisfitError
from shardviz.checkpoint.maps.made import Made, Op, called, leaves, parts_of
from shardviz.reference.lookup import is_alike, read_region
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.contents import Contents
    from shardviz.checkpoint.maps.made import Node
    from shardviz.checkpoint.tensor import Tensor
    from shardviz.layout.region import Region

MAX_TRIED = 24
"""Numbers that are tried in the place of one."""

MOST_ORDERED = 4
"""Parts of different shapes that are tried in every order."""

MAX_NAMED = 3
"""Parts that are named."""

_NUMBER = re.compile(r"(?<![^.\s(])[0-9]+(?=\.)|(?<=\.)[0-9]+(?![^.\s,)])")


@dataclass(frozen=True, slots=True)
class Instead:
    """What a tensor is, in the place of what the map makes.

    Attributes:
        why: That in words, the same for every layer.
        cause: What the conversion did; empty where that is not clear.
        fix: What to do.
    """

    why: str
    cause: str = ""
    fix: str = ""


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
        return read_region(self.bits, region)


def instead_of(made: Made, tensor: Tensor, known: Contents) -> Instead | None:
    """Return what a tensor is instead of what a map makes; None where that cannot be named.

    Args:
        made: What it should be.
        tensor: What it is: not that.
        known: The tensors of the side that it should be made of.
    """
    if is_alike(tensor.bits):
        return None
    for variant, words in _variants(made.node):
        if variant.shape == tensor.shape and _is(variant, made, tensor):
            return _in_words(made, variant, words)
    return _by_parts(made, tensor, known) if made.shape == tensor.shape else None


def _is(variant: Node, made: Made, tensor: Tensor) -> bool:
    node = variant if isinstance(variant, Op) else Op("cat", (variant,))
    return agree(replace(made, node=node, shape=node.shape), tensor)


def _in_words(made: Made, variant: Node, words: tuple[str, str]) -> Instead:
    cause, fix = words
    return Instead(f"it is {_short(variant)}, where the map makes {printable(made.text)}", cause, fix)


def _short(node: Node) -> str:
    """Return how something is made, with `*` for numbers, and once what is the same of all operands."""
    if not isinstance(node, Op):
        return starred(printable(node.name))
    parts = list(dict.fromkeys(map(_short, node.parts)))
    return f"{node.function}({', '.join((*parts, *map(str, node.numbers)))})"


def starred(text: str) -> str:
    """Return text with `*` for the numbers in the names of tensors.

    Example:
        >>> starred("cat(layers.0.w3, layers.0.w1, 0)")
        'cat(layers.*.w3, layers.*.w1, 0)'
    """
    return _NUMBER.sub("*", text)


def _variants(node: Op) -> Iterator[tuple[Node, tuple[str, str]]]:
    """Yield what a slip makes of an expression, each with a cause and a fix."""
    for variant, words in _slips(node):
        if _fits(variant):
            yield variant, words
    for turned in _transposed(node):
        if _fits(turned):
            yield turned, ("The tensor is transposed.", "transpose it in the conversion")


def _slips(node: Node) -> Iterator[tuple[Node, tuple[str, str]]]:
    """Yield a function and its operands, changed in one place; what is the same in all operands is changed in all."""
    if not isinstance(node, Op):
        return
    yield from _own_slips(node)
    inner = [list(_slips(part)) for part in node.parts]
    if len({len(slips) for slips in inner}) == 1:
        for column in zip(*inner, strict=True):
            yield replace_parts(node, tuple(one for one, _ in column)), column[0][1]
    for at, slips in enumerate(inner) if 1 < len(inner) <= MAX_NAMED else ():
        for one, words in slips:
            yield replace_parts(node, (*node.parts[:at], one, *node.parts[at + 1 :])), words


def replace_parts(node: Op, parts: tuple[Node, ...]) -> Op:
    """Return a function of other operands."""
    return Op(node.function, parts, node.numbers)


def _own_slips(node: Op) -> Iterator[tuple[Node, tuple[str, str]]]:
    name = node.function
    is_single = len(node.parts) == 1 and FUNCTIONS[name].views is not None
    if is_single:
        fix = f"apply {name} in the conversion{_in_torch(node)}"
        yield node.parts[0], (f"The conversion left out {name}.", fix)
    if name in INVERSE:
        back = Op(INVERSE[name], node.parts, node.numbers)
        yield back, (f"The conversion applied {name} the other way round.", f"apply {name}{_in_torch(node)}")
    if is_single:
        yield Op(name, (node,), node.numbers), (f"The conversion applied {name} twice.", f"apply {name} once")
    for numbers in _other_numbers(node):
        fix = "use the numbers of the map"
        yield Op(name, node.parts, numbers), (f"The conversion has another number in {name}.", fix)
    yield from _other_joins(node)


def _in_torch(node: Op) -> str:
    if node.function not in INVERSE or len(node.shape) != 2:
        return ""
    view = "head_dim // 2, 2" if node.function == "rotary" else "2, head_dim // 2"
    return f": w.view(-1, {view}, w.shape[1]).transpose(1, 2).reshape(w.shape)"


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


def _other_joins(node: Op) -> Iterator[tuple[Node, tuple[str, str]]]:
    """Yield parts beside each other where they should be in turns, and the other way round; and along other dims."""
    if node.function not in ("cat", "interleave") or len(node.parts) < 2:
        return
    dim = node.numbers[0] if node.numbers else 0
    dims = [dim, *(other for other in range(len(node.parts[0].shape)) if other != dim)]
    fix = f"join them as {node.function} along dim {dim}"
    other = "cat" if node.function == "interleave" else "interleave"
    how = "one after the other" if other == "cat" else "in turns"
    yield Op(other, node.parts, (dim,)), (f"The conversion joined the parts {how}.", fix)
    if len({part.shape for part in node.parts}) > 1 and len(node.parts) <= MOST_ORDERED:
        for order in list(permutations(node.parts))[1:]:
            yield Op(node.function, order, node.numbers), ("The conversion joined the parts in another order.", fix)
    for along in dims[1:]:
        yield Op(node.function, node.parts, (along,)), (f"The conversion joined the parts along dim {along}.", fix)


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


def _by_parts(made: Made, tensor: Tensor, known: Contents) -> Instead | None:
    """Name the tensors that are in the place of others; None where one of them is not known."""
    whole = tensor.bits
    odd: list[tuple[Tensor, Tensor]] = []
    num, same = 0, 0
    for view, part in parts_of(made.node, whole):
        if isinstance(part, Op):
            return None
        num += 1
        piece = Piece(part.name, part.shape, tensor.dtype, view.reshape(part.shape))
        if agree(part, piece):
            same += 1
            continue
        found = next(known.equal_to(piece), None)
        if found is None:
            return None if not same and num == 1 else _with_others(made, tensor)
        odd.append((part, found))
    return _order_of(made, odd, num) if odd else None


def _with_others(made: Made, tensor: Tensor) -> Instead | None:
    """Say which parts differ, where some do not."""
    names, num = [], 0
    for view, part in parts_of(made.node, tensor.bits):
        num += 1
        if isinstance(part, Op) or not agree(part, Piece("", part.shape, tensor.dtype, view.reshape(part.shape))):
            names.append(called(part))
    if len(names) == num:
        return None
    more = ", ..." if len(names) > MAX_NAMED else ""
    differ = "differs" if len(names) == 1 else "differ"
    return Instead(f"{len(names)} of its {num} parts {differ}: {', '.join(names[:MAX_NAMED])}{more}")


def _order_of(made: Made, odd: list[tuple[Tensor, Tensor]], num: int) -> Instead:
    """Say where each part is that is not in its place."""
    names = [leaf.name for leaf in leaves(made.node)]
    order = _renumbering(names, {part.name: found.name for part, found in odd})
    fix = f"make it as {made.text}"
    if order is not None:
        at, numbers = order
        _, words, _ = name_order(np.array(numbers), 0)
        words = _of_parts(words, _around(names[0], at))
        return Instead(f"its parts come in another order: {words}", "The parts were numbered in another order.", fix)
    shown = [
        f"{against(found.name, part.name)} where the map puts {against(part.name, found.name)}" for part, found in odd
    ]
    words = ", ".join(dict.fromkeys(shown[:MAX_NAMED])) + (
        f", and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
    )
    several = f" in {len(odd)} of its {counted(num, 'part')}" if num > len(odd) else ""
    return Instead(
        f"it has {words}{several}", "The conversion took another tensor, or joined them in another order.", fix
    )


def _of_parts(words: str, what: str) -> str:
    """Return a sentence about a dim's indices as one about parts: `experts`, or whatever their number counts."""
    return re.sub(r"dim 0's (?:indices|blocks of 1) (are|come)|dim 0 (is)|dim 0 (comes)", _plural(what), words)


def _plural(what: str) -> Callable[[re.Match[str]], str]:
    verbs = {"is": "are", "comes": "come"}
    return lambda found: f"the {what} {verbs.get(found[found.lastindex or 0], found[found.lastindex or 0])}"


def _renumbering(names: list[str], instead: dict[str, str]) -> tuple[int, list[int]] | None:
    """Return which number of their names parts are numbered by, and the order of the numbers that they have there."""
    found = [(name, instead.get(name, name)) for name in names]
    for at in range(len(_NUMBER.findall(names[0]))):
        pairs: dict[str, str] = {}
        for name, other in found:
            mine, theirs = _NUMBER.findall(name), _NUMBER.findall(other)
            if (
                _without(name, at) != _without(other, at)
                or len(mine) <= at
                or pairs.setdefault(mine[at], theirs[at]) != theirs[at]
            ):
                break
        else:
            numbers = [int(pairs[str(number)]) for number in range(len(pairs))] if _counts(pairs) else []
            if len(numbers) > 1 and sorted(numbers) == list(range(len(numbers))):
                return at, numbers
    return None


def _counts(pairs: dict[str, str]) -> bool:
    return all(str(number) in pairs for number in range(len(pairs)))


def _without(name: str, at: int) -> str:
    """Return a name with `*` for one of its numbers."""
    matches = list(_NUMBER.finditer(name))
    return name[: matches[at].start()] + "*" + name[matches[at].end() :] if at < len(matches) else name


def _around(name: str, at: int) -> str:
    """Return what a number of a name counts: the words before it."""
    return printable(name[: list(_NUMBER.finditer(name))[at].start()].rstrip(".").rpartition(".")[2])


def against(name: str, other: str) -> str:
    """Return a name with `*` for the numbers that it shares with another one."""
    theirs = _NUMBER.findall(other)
    numbers = iter(range(len(theirs) + len(name)))

    def turned(match: re.Match[str]) -> str:
        at = next(numbers)
        return "*" if at < len(theirs) and theirs[at] == match[0] else match[0]

    return printable(_NUMBER.sub(turned, name))
