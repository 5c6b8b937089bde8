"""What every run has, whatever it was read from: tensors by name, shards by rank, a report, a picture, short errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import numpy as np

from shardviz.dump.dump import ambiguity, hint_at_name
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout.region import Region, index_of, indices
from shardviz.picture.display import HTML, Drawable, framed
from shardviz.text import counted, listed, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from rich.text import Text

    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.notebook.verdicts import FindingOfRun, ReportOfRun
    from shardviz.picture.text.terminal import Terminal

    Array = NDArray[Any]
    Place = Region | NDArray[np.int64]
    """Where elements belong: a part of a tensor, or for each element its number from 1; 0 and less is nowhere."""

    Parts = Mapping[int, tuple[Place, Array]]

P = ParamSpec("P")
R = TypeVar("R")


def concise(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise `ShardvizError` as if from its caller; bugs keep their traceback."""

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        __tracebackhide__ = True  # pytest leaves this frame out
        try:
            return function(*args, **options)
        except ShardvizError as error:
            raise error.with_traceback(None) from None

    return called


T = TypeVar("T", bound=Drawable)


class UnknownTensorError(ShardvizError, KeyError):
    """No tensor has this name; the hint suggests one."""


class Tensors(Mapping[str, T]):
    """A run's tensors by name; a unique end of a name is enough.

    Attributes:
        num_results: How many of them are results of a step, and not tensors of the model.
    """

    num_results = 0

    def __init__(self, names: Iterable[str], made: Callable[[str], T], where: str) -> None:
        """Make a tensor when it is first asked for.

        Args:
            names: Their names, in order.
            made: Makes the tensor of a name.
            where: What errors call the run.
        """
        self._tensors: dict[str, T | None] = dict.fromkeys(names)
        self._made, self._where = made, where

    @concise
    def __getitem__(self, name: str) -> T:
        """Return the tensor of a name, or of the end of one.

        Raises:
            UnknownTensorError: No tensor has that name, or several end in it.
        """
        whole = self._full_name(name)
        tensor = self._tensors[whole] or self._made(whole)
        self._tensors[whole] = tensor
        return tensor

    def _full_name(self, name: str) -> str:
        if name in self._tensors:
            return name
        ends = [known for known in self._tensors if known.endswith(f".{name}")]
        if len(ends) == 1:
            return ends[0]
        if ends:
            raise UnknownTensorError(ambiguity(ends, name), f"write more of the name, as in {printable(ends[0])}")
        raise UnknownTensorError(f"{self._where} has no tensor {name!r}", hint_at_name(str(name), list(self._tensors)))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        results = f" and {counted(self.num_results, 'result')} of a step" if self.num_results else ""
        tensors = counted(len(self) - self.num_results, "tensor")
        return f"<{tensors}{results}: {listed(map(printable, self))}>"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


class Run(Drawable, Generic[T]):
    """What `shardviz.load` opens: tensors by name, `run["layers.0.up.weight"]`, and a check.

    Attributes:
        path: Where it was read from.
        mesh: The mesh of the run; None for a checkpoint, which says nothing of ranks.
        num_ranks: The ranks of the run, those without a file too; 0 for a checkpoint.
        tensors: Its tensors by name.
    """

    path: Path
    mesh: Mesh | None = None
    num_ranks = 0
    tensors: Tensors[T]

    @cached_property
    @abstractmethod
    def _report(self) -> ReportOfRun:
        """The report, made once."""

    @abstractmethod
    def page(self) -> str:
        """Return the run as an HTML page: what `shardviz show -o run.html` writes."""

    @abstractmethod
    def report_page(self, finding: Finding | None = None) -> str:
        """Return its findings as an HTML page, or one of them alone."""

    @abstractmethod
    def report_lines(self, terminal: Terminal, finding: Finding | None = None) -> list[Text]:
        """Return its report as text, or one of its findings with what it is seen by."""

    def check(self) -> ReportOfRun:
        """Check it as `shardviz check` does; the result is kept."""
        return self._report

    @property
    def findings(self) -> tuple[FindingOfRun, ...]:
        """What is wrong, worst first: the findings of `check()`."""
        return self._report.findings

    def part(self, name: str) -> Drawable:
        """Return the tensor of a name.

        Raises:
            UnknownTensorError: No tensor has that name, or several end in it.
        """
        return self[name]

    def markup(self) -> Mapping[str, str]:
        """Return its page in a frame."""
        return {HTML: framed(self.page())}

    @concise
    def __getitem__(self, name: str) -> T:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.tensors)


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
