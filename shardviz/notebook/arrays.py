"""Shards by rank, read when they are asked for, and the whole tensor that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardviz.errors import DumpError
from shardviz.layout.region import Region, index_of, indices
from shardviz.notebook.runs import concise
from shardviz.text import counted, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Place = Region | NDArray[np.int64]
    """Where elements belong: a part of a tensor, or for each element its number from 1; 0 and less is nowhere."""

    Parts = Mapping[int, tuple[Place, Array]]

MOST_SHOWN = 8
MOST_RANKS = 8

V = TypeVar("V")


class ByRank(Mapping[int, V]):
    """A mapping from rank to something that is made on demand."""

    def __init__(self, ranks: Iterable[int], read: Callable[[int], V], shown: Callable[[int], str]) -> None:
        """Read nothing yet.

        Args:
            ranks: The ranks, rising.
            read: Returns what is asked for of a rank.
            shown: Writes it in a few characters.
        """
        self._ranks, self._read, self._shown = dict.fromkeys(ranks), read, shown

    @concise
    def __getitem__(self, rank: int) -> V:
        if rank not in self._ranks:
            raise KeyError(rank)
        return self._read(rank)

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __repr__(self) -> str:
        ranks = list(self._ranks)
        shown = [f"{rank}: {self._shown(rank)}" for rank in ranks[:MOST_SHOWN]]
        more = [f"... {len(ranks) - MOST_SHOWN:,} more"] if len(ranks) > MOST_SHOWN else []
        return "{" + ", ".join([*shown, *more]) + "}"


def read_only(array: Array) -> Array:
    """Return a view of an array that cannot be written to."""
    view: Array = np.asarray(array).view()
    view.flags.writeable = False
    return view


def assembled(name: str, shape: Sequence[int], parts: Parts, absent: Sequence[int]) -> Array:
    """Put parts where they belong, and make sure that all elements are there and copies agree.

    Args:
        name: The tensor's name, for errors.
        shape: The shape in which places count.
        parts: For each rank where its elements belong, and the elements.
        absent: The ranks that left nothing, for errors.

    Raises:
        DumpError: Some elements are on no rank, two ranks hold different values of one, or a part has not the shape of
            its place.

    Example:
        >>> left, right = Region((((0, 2),),)), Region((((2, 4),),))
        >>> assembled("w", (4,), {0: (right, np.array([3, 4])), 1: (left, np.array([1, 2]))}, ())
        array([1, 2, 3, 4])
    """
    dtype = np.result_type(*(values.dtype for _, values in parts.values())) if parts else np.dtype(np.float64)
    whole, is_there = np.zeros(shape, dtype), np.zeros(shape, bool)
    for rank, (place, values) in parts.items():
        index, part = _index(name, rank, shape, place, values)
        known = is_there[index]
        if known.any():
            _check_copies(name, rank, parts, shape, (known, part, whole[index], index))
        whole[index], is_there[index] = part, True
    if not is_there.all():
        lost = int(is_there.size - np.count_nonzero(is_there))
        at = index_of(int(np.argmin(is_there)), shape)
        what = f"{lost:,} of {counted(is_there.size, 'element')}, the first at {at}, are on no rank that was read"
        who = f": {named_ranks(absent, MOST_RANKS)} left no file that can be read" if absent else ""
        raise DumpError(f"{printable(name)}: {what}{who}", "`.shards` has what is there; check() says what is wrong")
    return whole


def _index(name: str, rank: int, shape: Sequence[int], place: Place, values: Array) -> tuple[Any, Array]:
    """Return the index of a part in the whole tensor, and the part as it goes there."""
    if isinstance(place, Region):
        if place.shape != values.shape:
            what = f"rank {rank} holds a shard of {list(values.shape)}, and its place {place} is {list(place.shape)}"
            raise DumpError(f"{printable(name)}: {what}", "check() says what is wrong with its placements")
        if not place.is_within(shape):
            raise DumpError(f"{printable(name)}: the place of rank {rank}, {place}, is not within {list(shape)}")
        return np.ix_(*map(indices, place.dims)), values
    flat, own = place.ravel(), values.ravel()
    return np.unravel_index(flat[flat > 0] - 1, shape), own[flat > 0]


def _check_copies(name: str, rank: int, parts: Parts, shape: Sequence[int], sides: tuple[Any, ...]) -> None:
    """Raise if a rank's values differ from its copies'; signs of zero and kinds of NaN may."""
    known, part, there, index = sides
    differs = known & (part != there) & ~((part != part) & (there != there))
    if not differs.any():
        return
    numbers = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)[index]
    first = int(numbers[differs][0])
    other = next(at for at, (place, _) in parts.items() if _contains(place, first, shape))
    count = int(np.count_nonzero(differs))
    raise DumpError(
        f"{printable(name)}: ranks {other} and {rank} hold different values of {counted(count, 'element')}, "
        f"the first at {index_of(first, shape)}: {there[differs][0]:.9g} and {part[differs][0]:.9g}",
        "`.shards` has each rank's own; check() says what is wrong",
    )


def _contains(place: Place, element: int, shape: Sequence[int]) -> bool:
    if isinstance(place, Region):
        at = index_of(element, shape)
        pairs = zip(at, place.dims, strict=True)
        return all(any(start <= index < stop for start, stop in ranges) for index, ranges in pairs)
    return bool(np.any(place == element + 1))
