"""Recipes of a tensor from a second checkpoint's: turned, padded, joined or stacked.

It is seen by strips, a few values of each slice along a dim, and by where the other tensor has the same slices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.equality import can_cast, narrower, readable_bits
from shardviz.checkpoint.maps.functions import views_in
from shardviz.errors import DumpError
from shardviz.reference.lookup import line_hashes
from shardviz.relate.casts import cast, values_of
from shardviz.relate.values import is_alike, sampled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.by_content.families import Link, Numbers
    from shardviz.checkpoint.records import Tensor

    Places = NDArray[np.int64]

WIDTH = 16
"""Values of a slice that are looked up."""

FEWEST = 8
"""Values that tell slices apart: shorter slices are looked up with those behind them."""

UNKNOWN = -2
"""The place of a slice that is there several times, or whose values are all alike."""

MISSING = -1
LEAST_PART = 0.5
"""The part of all slices that must be where they are expected: a few of them may be wrong."""

ALIKE = 0.8
"""The correlation of two tensors of nearly the same values; that of 256 unrelated samples is below 0.4."""

MOST_PARTS = 16
"""Tensors of other names that one is made of."""

MOST_PADDING = 4
"""Padding that is not all alike is at most one in this many slices."""

SMALLEST_HEAD = 4
LARGEST_HEAD = 1024
ROTARY = ("rotary", "unrotary")


@dataclass(frozen=True, slots=True)
class View:
    """The last two dims of a tensor, at one index of its other dims, transposed or not.

    Attributes:
        index: The index of each of its first dims.
        turned: Whether the last two dims are exchanged.
    """

    tensor: Tensor
    index: tuple[int, ...] = ()
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape = self.tensor.shape[len(self.index) :]
        return (*shape[:-2], shape[-1], shape[-2]) if self.turned else shape

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers: a view of the mapped file if it is stored in one piece."""
        bits: NDArray[Any] = self.tensor.bits[self.index]
        return bits.swapaxes(-1, -2) if self.turned else bits


@dataclass(frozen=True)
class _Lines:
    """A few values of each slice of a tensor, by hashes.

    Attributes:
        width: How many values of a slice.
        hashes: The hash of each slice's.
        is_alike: Which slices are one number.
        keys: The hashes, sorted, each once.
        first: The first slice with each.
        counts: How many slices have each.
    """

    width: int
    hashes: NDArray[np.uint64]
    is_alike: NDArray[np.bool_]
    keys: NDArray[np.uint64]
    first: NDArray[np.int64]
    counts: NDArray[np.int64]

    @staticmethod
    def of(strip: NDArray[Any]) -> _Lines:
        """Return those of a strip, one row a slice."""
        hashes = line_hashes(strip)
        is_alike = (strip == strip[:, :1]).all(1)
        return _Lines(strip.shape[1], hashes, is_alike, *np.unique(hashes, return_index=True, return_counts=True))


@dataclass
class Strips:
    """A few values of each slice of a tensor; empty for a tensor that can't be read."""

    _lines: dict[tuple[int, tuple[int, ...], bool, int, str], _Lines | None] = field(default_factory=dict)

    def places(self, segment: View, whole: View, dim: int) -> NDArray[np.int64] | None:
        """Return where a tensor's slices are in a second one along a dim; None if unknown.

        Args:
            segment: The tensor whose slices are looked up.
            whole: The one that may have them; equal in all other dims.
        """
        types = segment.tensor.dtype, whole.tensor.dtype
        if not can_cast(*types):
            return None
        narrow = narrower(*types)
        part, lines = self._of(segment, dim, narrow), self._of(whole, dim, narrow)
        if part is None or lines is None or part.width != lines.width:
            return None
        at = np.minimum(np.searchsorted(lines.keys, part.hashes), len(lines.keys) - 1)
        single = np.where(lines.counts[at] > 1, UNKNOWN, lines.first[at])
        places = np.where(lines.keys[at] == part.hashes, single, MISSING)
        return np.where(part.is_alike, UNKNOWN, places)

    def _of(self, view: View, dim: int, dtype: str) -> _Lines | None:
        key = id(view.tensor), view.index, view.turned, dim, dtype
        if key not in self._lines:
            try:
                strip = cast(_strip(view.bits, dim), view.tensor.dtype, dtype)
            except (DumpError, OSError):
                strip = None
            self._lines[key] = None if strip is None else _Lines.of(strip)
        return self._lines[key]


def _strip(bits: NDArray[Any], dim: int) -> NDArray[Any]:
    """Return a few values of each slice along a dim, one row a slice.

    Rows of short slices go on with the slices that follow.
    """
    moved = np.moveaxis(bits, dim, 0)
    others = moved.shape[1:]
    spread = np.unique(np.linspace(0, math.prod(others) - 1, WIDTH).astype(np.int64))
    inside: tuple[Any, ...] = (slice(None), *np.unravel_index(spread, others)) if others else (slice(None), None)
    strip = moved[inside]
    behind = min(-(-FEWEST // strip.shape[1]), len(strip))
    if behind > 1:
        strip = np.lib.stride_tricks.sliding_window_view(strip, behind, 0).reshape(len(strip) - behind + 1, -1)
    return np.ascontiguousarray(strip)


def share_in_place(places: NDArray[np.int64], expected: NDArray[Any]) -> float:
    """Return the part of all slices that can be told apart that are where they are expected."""
    is_known = places != UNKNOWN
    is_there = places[is_known] == expected[: len(places)][is_known]
    return float(is_there.mean()) if len(is_there) else 0.0


def are_in_place(places: NDArray[np.int64], expected: NDArray[Any]) -> bool:
    """Whether most slices are where they are expected."""
    return share_in_place(places, expected) > LEAST_PART


def constant_of(tensor: Tensor) -> float | None:
    """Return the number that all values of a tensor are; None if they differ, or cannot be read."""
    bits = readable_bits(tensor)
    if bits is None or not bits.size or not is_alike(bits[(slice(0, 8),) * bits.ndim]) or not is_alike(bits):
        return None
    try:
        return float(values_of(np.array([bits.flat[0]]), tensor.dtype)[0])
    except TypeError:  # numpy has no such type: the scales of MX formats, floats of eight bits without infinity
        return None


def are_near(tensor: View, second: View) -> bool:
    """Whether two tensors of one shape correlate strongly, like two steps or a scaled copy."""
    try:
        sides = [values_of(sampled(view.bits), view.tensor.dtype) for view in (tensor, second)]
    except (DumpError, OSError):
        return False
    if len(sides[0]) < 2 * FEWEST or not np.isfinite(sides).all():
        return False
    centered = [values - values.mean() for values in sides]
    norms = [float(np.linalg.norm(values)) for values in centered]
    return bool(min(norms) > 0 and abs(float(centered[0] @ centered[1])) >= ALIKE * norms[0] * norms[1])


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
class _SourcePart:
    """Tensors that may be a part of a tensor.

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
    """Yield the ways to make a tensor of the other side's tensors with the same numbers.

    Args:
        sources: The families of the other side.
        strips: A few values of each.
    """
    near = [(link, link.parts[numbers]) for link in sources if numbers in link.parts]
    for depth in range(3):
        stacked = [
            (link, parts)
            for link, parts in near
            if len(link.extra) >= depth and parts and _counts(parts, depth, whole.shape)
        ]
        for at in (0, -1) if stacked and depth else (0,):
            index = tuple(size - 1 if at else 0 for size in whole.shape[:depth])
            inner = [
                (link, {key[depth:]: one for key, one in parts.items() if key[:depth] == index})
                for link, parts in stacked
            ]
            flat_recipes = list(_flat(View(whole, index), inner, strips, depth))
            yield from flat_recipes
            if flat_recipes:
                return


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
            candidates += [
                recipe for recipe in _recipes_of(view, parts, dim, turned, stacks) if recipe not in candidates
            ]
            if candidates and not any(one.padded for one in candidates):
                break
        if candidates:
            exact = [one for one in candidates if not one.padded]
            yield from exact or candidates[:1]
            return


def _parts(
    view: View, sources: Sequence[tuple[Link, Mapping[Numbers, Tensor]]], strips: Strips, dim: int
) -> Iterator[_SourcePart]:
    """Yield the parts whose slices are in a tensor, most of them."""
    for link, members in sources:
        if not members:
            continue
        shape = next(iter(members.values())).shape
        if len(shape) != len(view.shape) or shape[dim] > view.shape[dim] or 0 in shape:
            continue
        if shape[:dim] + shape[dim + 1 :] != view.shape[:dim] + view.shape[dim + 1 :]:
            continue
        if len(members) > 1 and sorted(members) != [(at,) for at in range(len(members))]:
            continue
        places = strips.places(View(members[min(members)]), view, dim)
        if places is None:
            continue
        segment = _SourcePart(link, shape[dim], len(members), places)
        if segment.is_alike or are_in_place(np.where(places >= 0, 0, places), np.zeros(len(places), np.int64)):
            yield segment


def _recipes_of(view: View, parts: list[_SourcePart], dim: int, turned: bool, stacks: int) -> Iterator[Recipe]:
    """Yield recipes for a tensor: one source, then several joined, then several with padding."""
    size = view.shape[dim]
    plain = Recipe((), dim, turned=turned, stacks=stacks)
    whole = [part for part in parts if part.size == size and part.count == 1 and not part.is_alike]
    for segment in whole:
        if (rotary := _rotary(segment, 0, dim, turned)) is not None:
            yield Recipe((segment.link,), rotary=(rotary,), turned=turned, stacks=stacks)
    few = sorted((part for part in parts if part.size < size), key=lambda part: part.start)
    fillers = [part for part in few if part.is_alike]
    few = [part for part in few if not part.is_alike]
    few = [part for at, part in enumerate(few) if all(part.places.tolist() != one.places.tolist() for one in few[:at])]
    if whole or not few or len(few) > MOST_PARTS:
        return
    if len(few) == 1 and few[0].count > 1 and few[0].size * few[0].count == size:
        if are_in_place(few[0].places, np.arange(size)):
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
    elif len(few) == 1 and are_in_place(few[0].places, np.arange(size)) and _is_padded(view, few[0], dim):
        yield replace(plain, links=links, padded=size)


def _filled(parts: Sequence[_SourcePart], fillers: Sequence[_SourcePart], size: int) -> list[_SourcePart]:
    """Fill each gap between parts with a constant tensor, if exactly one has the gap's size."""
    filled: list[_SourcePart] = []
    start = 0
    for stop, segment in [*((part.start, part) for part in parts), (size, None)]:
        fits_gap = [one for one in fillers if one.size == stop - start and one.count == 1 and one not in filled]
        filled += fits_gap if len(fits_gap) == 1 else []
        if segment is not None:
            filled.append(segment)
            start = stop + segment.size
    return filled


def _is_padded(view: View, segment: _SourcePart, dim: int) -> bool:
    """Whether the rows behind a segment may be padding: all alike, or of a vocabulary."""
    behind = np.moveaxis(view.bits, dim, 0)[segment.size :]
    is_few = MOST_PADDING * len(behind) <= view.shape[dim]
    return is_alike(behind) or (dim == 0 and is_few and "*" not in segment.link.family.pattern)


def _one_after_the_other(parts: Sequence[_SourcePart], dim: int, turned: bool) -> tuple[tuple[str, int], ...] | None:
    kinds, start = [], 0
    for segment in parts:
        kind = ("", 0) if segment.is_alike else _rotary(segment, start, dim, turned)
        if kind is None:
            return None
        kinds.append(kind)
        start += segment.size
    return tuple(kinds)


def _rotary(segment: _SourcePart, start: int, dim: int, turned: bool) -> tuple[str, int] | None:
    """Return how the rows of a part are reordered: not, or by heads; None if it is neither."""
    places = np.where(segment.places >= 0, segment.places - start, segment.places)
    places = np.where((segment.places >= 0) & (places < 0), MISSING, places)
    plain = share_in_place(places, np.arange(segment.size))
    best: tuple[float, tuple[str, int]] = plain, ("", 0)
    heads = (
        range(SMALLEST_HEAD, min(segment.size, LARGEST_HEAD) + 1, 2) if plain < 1 and dim == 0 and not turned else ()
    )
    for head in (head for head in heads if segment.size % head == 0):
        for kind in ROTARY:
            best = max(
                best,
                (share_in_place(places, _reordered(kind, segment.size, head)), (kind, head)),
                key=lambda one: one[0],
            )
    return best[1] if best[0] > LEAST_PART else None


def _reordered(kind: str, size: int, head: int) -> NDArray[np.int64]:
    """Return where each row is after it was reordered by heads."""
    (view,) = views_in(np.arange(size), kind, [(size,)], (head,))
    return np.asarray(view.reshape(-1))


def _blocks(parts: Sequence[_SourcePart]) -> int:
    """Return of how many blocks each parts come in turns; 0 if they do not."""
    total, common = sum(part.size for part in parts), math.gcd(*(part.size for part in parts))
    for blocks in range(2, common + 1):
        if common % blocks == 0:
            expected = views_in(np.arange(total), "interleave", [(part.size,) for part in parts], (0, blocks))
            if all(
                part.is_alike or are_in_place(part.places, view.reshape(-1))
                for part, view in zip(parts, expected, strict=True)
            ):
                return blocks
    return 0
