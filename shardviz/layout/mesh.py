"""The device mesh: named axes, the rank at every coordinate, and the groups along an axis.

Offline: no torch here. A `Mesh` is what `torch.distributed.device_mesh.DeviceMesh` is, without process groups.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product, zip_longest
from typing import TYPE_CHECKING, TypeVar

from shardviz.errors import MeshError
from shardviz.groups import in_groups
from shardviz.text import counted, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

Coord = tuple[int, ...]
What = TypeVar("What", bound="Hashable")
AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MAX_RANKS = 1 << 20
MAX_AXES = 32


@dataclass(frozen=True)
class Mesh:
    """Ranks arranged in a grid whose axes have names.

    Attributes:
        axes: The axes' names, outermost first.
        shape: The number of ranks along each axis.
        ranks: The global rank at each coordinate, row-major. Left empty, ranks count up from 0.

    Raises:
        MeshError: An axis is repeated or unnamed, a size is below one, the ranks do not fill the grid once each, or
            there are more than `MAX_RANKS` of them.

    Example:
        >>> mesh = Mesh(("fsdp", "tp"), (2, 4))
        >>> mesh.coord_of(5), mesh.label(5)
        ((1, 1), 'fsdp=1, tp=1')
        >>> mesh.groups("tp")
        [(0, 1, 2, 3), (4, 5, 6, 7)]
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        self._check_axes()
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        if len(self.ranks) != self.size:
            sizes = " * ".join(map(str, self.shape))
            raise MeshError(f"mesh has {sizes} = {self.size} places but {len(self.ranks)} ranks")
        if min(self.ranks) < 0:
            raise MeshError(f"mesh names rank {min(self.ranks)}", "ranks count from 0")
        if len(set(self.ranks)) < self.size:
            raise MeshError(f"mesh names rank {Counter(self.ranks).most_common(1)[0][0]} more than once")

    def _check_axes(self) -> None:
        if len(self.axes) != len(self.shape):
            raise MeshError(f"mesh has {len(self.shape)} sizes but {len(self.axes)} axis names")
        if self.ndim > MAX_AXES:
            raise MeshError(f"mesh has {self.ndim} axes, more than {MAX_AXES}")
        for axis, size in self.sizes:
            if not AXIS_NAME.fullmatch(axis):
                raise MeshError(f"mesh axis {axis!r} is not a name", "letters, digits and _ only, as in fsdp=2,tp=4")
            if size < 1:
                raise MeshError(f"mesh axis {axis} has size {size}", "every axis needs at least one rank")
        repeated = [axis for axis, count in Counter(self.axes).items() if count > 1]
        if repeated:
            raise MeshError(
                f"mesh axis {repeated[0]} is named {self.axes.count(repeated[0])} times",
                "name each axis once",
            )
        if self.size > MAX_RANKS:
            raise MeshError(f"mesh {self} has more than {MAX_RANKS:,} ranks")

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.shape, self.ranks))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Mesh], tuple[object, ...]]:
        """Leave the hash behind: in another process strings have other hashes."""
        return type(self), (self.axes, self.shape, self.ranks)

    @property
    def size(self) -> int:
        """Number of ranks on the mesh."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.axes)

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The axes, each with its number of ranks."""
        return tuple(zip(self.axes, self.shape, strict=True))

    @property
    def long_axes(self) -> tuple[str, ...]:
        """The axes along which there are several ranks: nothing depends on the others."""
        return tuple(axis for axis, size in self.sizes if size > 1)

    @cached_property
    def index_of_rank(self) -> dict[int, int]:
        """Each rank's index in `ranks`."""
        return {rank: index for index, rank in enumerate(self.ranks)}

    def axis_index(self, axis: str) -> int:
        """Return the position of `axis` among the axes.

        Raises:
            MeshError: The mesh has no such axis.
        """
        if axis not in self.axes:
            known = f"its axes are {', '.join(self.axes) or '(none)'}"
            if self.axes == unnamed_axes(self.ndim):
                known += "; name them together with their sizes, as in fsdp=2,tp=4"
            raise MeshError(f"mesh {self} has no axis {axis!r}", f"{did_you_mean(axis, self.axes)} {known}".lstrip())
        return self.axes.index(axis)

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return self.shape[self.axis_index(axis)]

    def size_over(self, axes: Iterable[str]) -> int:
        """Return the number of ranks along some axes together."""
        return math.prod(map(self.axis_size, axes))

    def coords(self) -> Iterator[Coord]:
        """Yield every coordinate, row-major: the order of `ranks`."""
        return product(*map(range, self.shape))

    def rank_at(self, coord: Coord) -> int:
        """Return the global rank at a coordinate."""
        index = 0
        for size, position in zip(self.shape, coord, strict=True):
            index = index * size + position
        return self.ranks[index]

    def coord_of(self, rank: int) -> Coord:
        """Return the coordinate of a global rank.

        Raises:
            MeshError: The rank is not on the mesh.
        """
        if rank not in self.index_of_rank:
            raise MeshError(f"rank {rank} is not on mesh {self}")
        index, coord = self.index_of_rank[rank], []
        for size in reversed(self.shape):
            index, position = divmod(index, size)
            coord.append(position)
        return tuple(reversed(coord))

    def __contains__(self, rank: object) -> bool:
        return rank in self.index_of_rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ only along `axes`, each in coordinate order."""
        positions = {self.axis_index(axis) for axis in axes}
        indices: list[list[int]] = [[0], [0]]  # where groups begin, and what their members add to that
        for index, size in enumerate(self.shape):
            along = index in positions
            indices = [
                [one * size + at for one in ones for at in (range(size) if is_members == along else (0,))]
                for is_members, ones in enumerate(indices)
            ]
        return [tuple([self.ranks[first + more] for more in indices[1]]) for first in indices[0]]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return a rank's group along `axes`, the rank included, in coordinate order.

        Raises:
            MeshError: The rank is not on the mesh, or the mesh has no such axis.
        """
        positions = {self.axis_index(axis) for axis in axes}
        places = enumerate(zip(self.coord_of(rank), self.shape, strict=True))
        ways = (range(size) if index in positions else (position,) for index, (position, size) in places)
        return tuple(map(self.rank_at, product(*ways)))

    def axes_along(self, group: tuple[int, ...]) -> tuple[str, ...]:
        """Return the fewest neighboring axes that a group runs along, outermost first; none if it runs along none."""
        for width in range(1, self.ndim + 1):
            for first in range(self.ndim - width + 1):
                axes = self.axes[first : first + width]
                if group in self.groups(*axes):
                    return axes
        return ()

    def axes_within(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the axes along which some ranks differ; none if one of them is not on the mesh."""
        if any(rank not in self for rank in ranks):
            return ()
        places = zip(*map(self.coord_of, ranks), strict=True)
        return tuple(axis for axis, own in zip(self.axes, places, strict=False) if len({*own}) > 1)

    def within(self, ranks: Sequence[int]) -> Mesh:
        """Return the part of the mesh that some ranks are, such as a stage of a pipeline; all of it if they are none.

        Example:
            >>> Mesh(("pp", "tp"), (2, 2)).within((2, 3)).shape
            (1, 2)
        """
        axes = self.axes_within(ranks)
        if not ranks or len(ranks) == self.size or self.size_over(axes) != len(ranks):
            return self
        shape = tuple(size if axis in axes else 1 for axis, size in self.sizes)
        return Mesh(self.axes, shape, self.group_of(ranks[0], *axes))

    def label(self, rank: int) -> str:
        """Return a rank's coordinate in words: `fsdp=0, tp=3`."""
        return ", ".join(f"{axis}={position}" for axis, position in zip(self.axes, self.coord_of(rank), strict=True))

    @property
    def labels(self) -> list[str]:
        """Every rank's coordinate in words, in the order of the ranks' numbers."""
        return [self.label(rank) for rank in sorted(self.ranks)]

    def __str__(self) -> str:
        return "(" + ", ".join(f"{axis}={size}" for axis, size in self.sizes) + ")"


def ranks_by(pairs: Iterable[tuple[int, What]]) -> dict[What, list[int]]:
    """Group ranks by what they have, in the order in which it is first met.

    Example:
        >>> ranks_by([(0, "a"), (1, "b"), (2, "a")])
        {'a': [0, 2], 'b': [1]}
    """
    return in_groups((what, rank) for rank, what in pairs)


def parse_mesh(text: str, default_axes: Sequence[str] = ()) -> Mesh:
    """Read `2,4`, `2x4` or `fsdp=2,tp=4`.

    Args:
        text: Sizes separated by commas, each optionally with the name of its axis; or sizes alone separated by `x`.
        default_axes: Names for sizes without one; by default `dim0`, `dim1`, ...

    Raises:
        MeshError: The text is not a mesh, or it names some axes and not others.

    Example:
        >>> print(parse_mesh("fsdp=2,tp=4"), parse_mesh("2x4"), parse_mesh("2,4", ["fsdp", "tp"]))
        (fsdp=2, tp=4) (dim0=2, dim1=4) (fsdp=2, tp=4)
    """
    separator = "," if "," in text or "=" in text else "x"
    parts = [part.rpartition("=") for part in text.split(separator)]
    sizes = [_size(text, size.strip()) for _, _, size in parts]
    names = [name.strip() for name, equals, _ in parts if equals]
    if names and len(names) != len(sizes):
        raise MeshError(f"mesh {text!r} names {len(names)} of its {len(sizes)} axes", "name all of them or none")
    return Mesh(tuple(names) or _default_names(text, sizes, default_axes), tuple(sizes))


def _size(text: str, size: str) -> int:
    if not re.fullmatch("[0-9]+", size):
        raise MeshError(f"mesh {text!r}: {size!r} is not a size", "write it as 2,4 or fsdp=2,tp=4")
    if len(size) > len(str(MAX_RANKS)):
        raise MeshError(f"mesh {text!r} has more than {MAX_RANKS:,} ranks")
    return int(size)


def unnamed_axes(count: int) -> tuple[str, ...]:
    """Return the names that axes have until they are given some: `dim0`, `dim1`, ..."""
    return tuple(f"dim{index}" for index in range(count))


def _default_names(text: str, sizes: Sequence[int], default_axes: Sequence[str]) -> tuple[str, ...]:
    if not default_axes:
        return unnamed_axes(len(sizes))
    if len(sizes) != len(default_axes):
        given = f"{counted(len(sizes), 'size')} for {len(default_axes)} ax{'i' if len(default_axes) == 1 else 'e'}s"
        pairs = zip_longest(default_axes, sizes[: len(default_axes)], fillvalue=2)
        example = ",".join(f"{axis}={size}" for axis, size in pairs)
        raise MeshError(
            f"mesh {text!r} has {given}: {', '.join(default_axes)}", f"give one size per axis, as in {example}"
        )
    return tuple(default_axes)
