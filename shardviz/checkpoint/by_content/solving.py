"""How one tensor is made of those of another checkpoint: whole, turned, padded, of several, in turns, or stacked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.by_content.strips import LEAST_PART, MISSING, UNKNOWN, View, fits, share
from shardviz.checkpoint.maps.functions import FUNCTIONS
from shardviz.relate.values import is_alike

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.by_content.numbered import Link, Numbers
    from shardviz.checkpoint.by_content.strips import Strips
    from shardviz.checkpoint.tensor import Tensor

    Places = NDArray[np.int64]

MOST_PARTS = 16
"""Tensors of other names that one is made of."""

MOST_PADDING = 4
"""Padding that is not all alike is at most one in this many slices."""

SMALLEST_HEAD = 4
LARGEST_HEAD = 1024
ROTARY = ("rotary", "unrotary")


@dataclass(frozen=True)
class Recipe:
    """How a tensor is made of others.

    Attributes:
        links: The families that it is made of, in their order.
        dim: The dim along which they come one after the other.
        blocks: In turns, so many blocks of each; 0 for one after the other.
        turned: Whether the last two dims are exchanged afterwards.
        rotary: For each part, how its rows are reordered before: a function and the rows of a head, or neither.
        padded: Its size along the dim if its end is padding; else 0.
        joined: Whether all tensors of a family are one after the other.
        stacks: How many new dims are in front.
    """

    links: tuple[Link, ...]
    dim: int = 0
    blocks: int = 0
    turned: bool = False
    rotary: tuple[tuple[str, int], ...] = ()
    padded: int = 0
    joined: bool = False
    stacks: int = 0

    def text(self, numbers: Numbers | None = None) -> str:
        """Return it in the language of maps: with `*`, or for the tensor of some numbers."""
        kinds = self.rotary or (("", 0),) * len(self.links)
        parts = [
            f"{kind}({link.name(numbers)}, {head})" if kind else link.name(numbers)
            for link, (kind, head) in zip(self.links, kinds, strict=True)
        ]
        along = [self.dim] if self.dim or self.blocks else []
        if self.blocks:
            words = f"interleave({', '.join(map(str, [*parts, *along, self.blocks]))})"
        elif len(parts) > 1 or self.joined:
            words = f"cat({', '.join(map(str, [*parts, *along]))})"
        else:
            words = parts[0]
        if self.padded:
            words = f"pad({', '.join(map(str, [words, self.padded, *along]))})"
        words = f"transpose({words})" if self.turned else words
        for _ in range(self.stacks):
            words = f"stack({words})"
        return words


@dataclass(frozen=True)
class _Part:
    """Tensors that may be some of a tensor.

    Attributes:
        link: Their family.
        size: The slices of each along the dim.
        count: How many of them there are.
        places: Where the slices of the first one are.
    """

    link: Link
    size: int
    count: int
    places: Places

    @property
    def is_alike(self) -> bool:
        """Whether its values do not tell where it is: they are all one number."""
        return bool((self.places == UNKNOWN).all())

    @property
    def start(self) -> int:
        """The first slice that is of it."""
        return int(self.places[self.places >= 0].min(initial=np.iinfo(np.int64).max))


def recipes(whole: Tensor, numbers: Numbers, sources: Sequence[Link], strips: Strips) -> Iterator[Recipe]:
    """Yield how a tensor may be made of those that belong to its numbers: several if there are several of one content.

    Args:
        whole: The tensor.
        numbers: Its numbers.
        sources: The families of the other side.
        strips: A few values of each.
    """
    near = [(link, link.parts[numbers]) for link in sources if numbers in link.parts]
    for depth in range(3):
        stacked = [
            (link, parts)
            for link, parts in near
            if len(link.extra) >= depth and _shape_of(parts) is not None and _counts(parts, depth, whole.shape)
        ]
        for at in (0, -1) if stacked and depth else (0,):
            index = tuple(size - 1 if at else 0 for size in whole.shape[:depth])
            inner = [
                (link, {key[depth:]: one for key, one in parts.items() if key[:depth] == index})
                for link, parts in stacked
            ]
            found = list(_flat(View(whole, index), inner, strips, depth))
            yield from found
            if found:
                return


def _shape_of(parts: Mapping[Numbers, Tensor]) -> tuple[int, ...] | None:
    return next((one.shape for one in parts.values()), None)


def _counts(parts: Mapping[Numbers, Tensor], depth: int, shape: tuple[int, ...]) -> bool:
    """Whether the numbers that only the parts have count the first dims of the whole, from 0."""
    if not depth:
        return True
    columns = [sorted({key[at] for key in parts}) for at in range(depth)]
    return len(shape) > depth and all(column == list(range(size)) for column, size in zip(columns, shape, strict=False))


def _flat(
    whole: View, sources: Sequence[tuple[Link, Mapping[Numbers, Tensor]]], strips: Strips, stacks: int
) -> Iterator[Recipe]:
    """Yield how a tensor may be made without new dims."""
    for turned in (False, True) if len(whole.shape) > 1 else (False,):
        view = View(whole.tensor, whole.index, turned)
        candidates: list[Recipe] = []
        for dim in range(len(view.shape)):
            parts = list(_parts(view, sources, strips, dim))
            candidates += [recipe for recipe in _made(view, parts, dim, turned, stacks) if recipe not in candidates]
            if candidates and not any(one.padded for one in candidates):
                break
        if candidates:
            exact = [one for one in candidates if not one.padded]
            yield from exact or candidates[:1]
            return


def _parts(
    view: View, sources: Sequence[tuple[Link, Mapping[Numbers, Tensor]]], strips: Strips, dim: int
) -> Iterator[_Part]:
    """Yield the parts whose slices are in a tensor, most of them."""
    for link, members in sources:
        shape = _shape_of(members)
        if shape is None or len(shape) != len(view.shape) or shape[dim] > view.shape[dim] or 0 in shape:
            continue
        if shape[:dim] + shape[dim + 1 :] != view.shape[:dim] + view.shape[dim + 1 :]:
            continue
        if len(members) > 1 and sorted(members) != [(at,) for at in range(len(members))]:
            continue
        places = strips.places(View(members[min(members)]), view, dim)
        if places is None:
            continue
        part = _Part(link, shape[dim], len(members), places)
        if part.is_alike or fits(np.where(places >= 0, 0, places), np.zeros(len(places), np.int64)):
            yield part


def _made(view: View, parts: list[_Part], dim: int, turned: bool, stacks: int) -> Iterator[Recipe]:
    """Yield how parts make up a tensor: each of them all of it, or all of them together; at last with padding."""
    size = view.shape[dim]
    plain = Recipe((), dim, turned=turned, stacks=stacks)
    whole = [part for part in parts if part.size == size and part.count == 1 and not part.is_alike]
    for part in whole:
        if (rotary := _rotary(part, 0, dim, turned)) is not None:
            yield Recipe((part.link,), rotary=(rotary,), turned=turned, stacks=stacks)
    few = sorted((part for part in parts if part.size < size), key=lambda part: part.start)
    fillers = [part for part in few if part.is_alike]
    few = [part for part in few if not part.is_alike]
    few = [part for at, part in enumerate(few) if all(part.places.tolist() != one.places.tolist() for one in few[:at])]
    if whole or not few or len(few) > MOST_PARTS:
        return
    if len(few) == 1 and few[0].count > 1 and few[0].size * few[0].count == size:
        if fits(few[0].places, np.arange(size)):
            yield replace(plain, links=(few[0].link,), joined=True)
        return
    few = _filled(few, fillers, size)
    links = tuple(part.link for part in few)
    if any(part.count > 1 for part in few):
        return
    if sum(part.size for part in few) == size and len(few) > 1:
        if (kinds := _one_after_the_other(few, dim, turned)) is not None:
            yield replace(plain, links=links, rotary=kinds)
        elif blocks := _blocks(few):
            yield replace(plain, links=links, blocks=blocks)
    elif len(few) == 1 and fits(few[0].places, np.arange(size)) and _is_padded(view, few[0], dim):
        yield replace(plain, links=links, padded=size)


def _filled(parts: Sequence[_Part], fillers: Sequence[_Part], size: int) -> list[_Part]:
    """Return parts with what is all one number, such as a bias at first, in each gap that only one such part fits."""
    filled: list[_Part] = []
    start = 0
    for stop, part in [*((part.start, part) for part in parts), (size, None)]:
        fits_gap = [one for one in fillers if one.size == stop - start and one.count == 1 and one not in filled]
        filled += fits_gap if len(fits_gap) == 1 else []
        if part is not None:
            filled.append(part)
            start = stop + part.size
    return filled


def _is_padded(view: View, part: _Part, dim: int) -> bool:
    """Whether what is behind a part may be padding: all alike; of a vocabulary, which no number counts, anything."""
    behind = np.moveaxis(view.bits, dim, 0)[part.size :]
    is_few = MOST_PADDING * len(behind) <= view.shape[dim]
    return is_alike(behind) or (dim == 0 and is_few and "*" not in part.link.family.pattern)


def _one_after_the_other(parts: Sequence[_Part], dim: int, turned: bool) -> tuple[tuple[str, int], ...] | None:
    kinds, start = [], 0
    for part in parts:
        kind = ("", 0) if part.is_alike else _rotary(part, start, dim, turned)
        if kind is None:
            return None
        kinds.append(kind)
        start += part.size
    return tuple(kinds)


def _rotary(part: _Part, start: int, dim: int, turned: bool) -> tuple[str, int] | None:
    """Return how the rows of a part are reordered: not, or by heads; None if it is neither."""
    places = np.where(part.places >= 0, part.places - start, part.places)
    places = np.where((part.places >= 0) & (places < 0), MISSING, places)
    plain = share(places, np.arange(part.size))
    best: tuple[float, tuple[str, int]] = plain, ("", 0)
    heads = range(SMALLEST_HEAD, min(part.size, LARGEST_HEAD) + 1, 2) if plain < 1 and dim == 0 and not turned else ()
    for head in (head for head in heads if part.size % head == 0):
        for kind in ROTARY:
            best = max(best, (share(places, _reordered(kind, part.size, head)), (kind, head)), key=lambda one: one[0])
    return best[1] if best[0] > LEAST_PART else None


def _reordered(kind: str, size: int, head: int) -> NDArray[np.int64]:
    """Return where each row is after it was reordered by heads."""
    views = FUNCTIONS[kind].views
    assert views is not None
    (view,) = views(np.arange(size), [(size,)], (head,))
    return np.asarray(view.reshape(-1))


def _blocks(parts: Sequence[_Part]) -> int:
    """Return of how many blocks each parts come in turns; 0 if they do not."""
    total, common = sum(part.size for part in parts), math.gcd(*(part.size for part in parts))
    views = FUNCTIONS["interleave"].views
    assert views is not None
    for blocks in range(2, common + 1):
        if common % blocks == 0:
            expected = views(np.arange(total), [(part.size,) for part in parts], (0, blocks))
            if all(
                part.is_alike or fits(part.places, view.reshape(-1)) for part, view in zip(parts, expected, strict=True)
            ):
                return blocks
    return 0
